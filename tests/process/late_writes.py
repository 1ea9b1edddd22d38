"""Trials whether a sender's write can reach memory that has become another room's.

`python -m tests.process.late_writes --times 100 --transport tcp --json` runs one trial after another on real
workers. In a trial a prefill worker is stopped (SIGSTOP) at a point of a room's hand-over, the room is
aborted, and another room wants its pages at once; then the stopped worker goes on, dies, is reported to have
exited, or has the memory taken from it. The control is the same with the defence taken out, and shows that
there is something to fear.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, field
from itertools import cycle, islice
from typing import Final

from tests.process.actors import Defence
from tests.process.forged_exits import report_exits
from tests.process.pair import GPU, LARGE, TRANSPORTS, AskedRoom, WorkerTrio, until, workers

POINTS: Final = {
    "tcp": ("posted", "posting", "midway", "granted"),
    "cma": ("posting", "midway", "granted"),
    GPU: ("posting", "midway", "granted"),
}
"""Points at which a sender is stopped. granted: before it computes. posting: between its decision to write
and the write. posted: the write is under way and the receiver makes no progress. This is over TCP alone,
since elsewhere posting copies. midway: some milliseconds after it may begin, at any point."""
BYSTANDER_TOKENS: Final = 40


def stop_at(pair: WorkerTrio, point: str, draw: random.Random) -> AskedRoom:
    """Open a room, stop its sender at this point, and let the receiver give the room up. Returns the room."""
    sender, decode = pair.stopped, pair.decode
    sender.ask("hold")
    doomed = pair.open(sender, LARGE)
    until(lambda: sender.ask("granted", doomed.id), "the grant")
    match point:
        case "granted":
            sender.freeze()
            sender.begin("go")
        case "posting":
            sender.ask("stop_before_put")
            sender.ask("go")
            until(lambda: sender.frozen, "the stop")
        case "midway":
            sender.ask("go")
            time.sleep(draw.uniform(0.0, 0.02))
            sender.freeze()
        case "posted":
            decode.ask("pause")
            until(lambda: decode.ask("paused"), "the pause")
            sender.ask("go")
            until(lambda: sender.ask("under_way", doomed.id), "the write")
            sender.freeze()
            decode.ask("resume")
    doomed.at_decode.cancel()
    return doomed


@dataclass
class LoopHistogram:
    """Outcomes of one kind of trial."""

    trials: int = 0
    withheld: int = 0
    """Trials in which the aborted room's pages were kept from the next room."""
    corrupted: int = 0
    """Trials in which that room's memory was overwritten."""
    seconds: float = 0.0
    points: dict[str, int] = field(default_factory=dict)


def trial(pair: WorkerTrio, point: str, draw: random.Random, then: str, tally: LoopHistogram) -> None:
    """Stop a sender at `point` and give the room up. Then: it goes on ("continued"), dies ("killed"), or has
    the memory taken from it before it goes on ("revoked"). Or others report its exit to a bootstrap before it
    goes on ("reported"), and are believed ("believed"). The heir to its pages is checked, byte by byte."""
    started = time.monotonic()
    decode, revocations = pair.decode, pair.decode.ask("revocations")
    bystander = pair.open(pair.steady, 2, max_tokens=BYSTANDER_TOKENS)
    until(lambda: bystander.at_decode.tokens(), "the bystander is admitted")
    doomed = stop_at(pair, point, draw)
    # A room that failed is there for another turn: what its memory is says whether it is kept.
    until(lambda: decode.ask("standing", doomed.id) in ("", "quarantined"), "the abort")
    # On a busy machine its memory may have been taken back before anybody looked.
    withheld = decode.ask("standing", doomed.id) == "quarantined" or decode.ask("revocations") > revocations
    if then == "killed":
        pair.stopped.kill()
        decode.ask("depart", pair.stopped.incarnation)
    if then == "revoked" and withheld:
        until(lambda: decode.ask("revocations") > revocations, "the revocation")
    if then == "reported":
        answers, departed = asyncio.run(report_exits(pair.stopped, pair.authority()))
        assert answers == {"NotProven"}
        for incarnation in departed:  # as the next renewal of decode's lease says it
            decode.ask("depart", incarnation)
    if then == "believed":
        decode.ask("depart", pair.stopped.incarnation)
    bystander.check_answered()
    decode.ask("hold")
    heir = pair.open(pair.steady, LARGE)
    if then in ("continued", "reported") and withheld:
        until(lambda: decode.ask("phase", heir.id) in ("waiting_for_input", "success"), "the heir waits")
        time.sleep(draw.uniform(0.0, 0.05))
        waits = decode.ask("standing", heir.id) in ("", "held")
        still_withheld = decode.ask("standing", doomed.id) == "quarantined"
        assert still_withheld or point == "midway", "there alone, all may be under way, and land"
        assert waits or not still_withheld, "no page of the doomed room is anyone else's"
    else:
        until(lambda: decode.ask("phase", heir.id) == "success", "the heir lands")
    if then == "believed":
        pair.stopped.thaw()
        until(lambda: (decode.ask("wake"), not pair.stopped.ask("under_way", doomed.id))[1], "the late write")
        pair.stopped.kill()
    elif then != "killed":
        pair.stopped.thaw()
        if point == "granted":
            pair.stopped.answer()
        until(lambda: decode.ask("phase", heir.id) == "success", "the heir lands")
        until(
            lambda: (decode.ask("wake"), not pair.stopped.ask("rooms"))[1], "the stopped sender's room ends"
        )
    decode.ask("go")
    heir.check_answered()
    if then in ("killed", "believed"):
        pair.stopped = pair.start("prefill")
    pair.open(pair.stopped, 1).check_answered()
    foreign = decode.ask("foreign")
    pair.wait_at_rest()
    tally.trials += 1
    tally.withheld += withheld
    tally.corrupted += any(line.startswith(f"room {heir.id} ") for line in foreign)
    tally.points[point] = tally.points.get(point, 0) + 1
    tally.seconds = round(tally.seconds + time.monotonic() - started, 2)
    assert not [line for line in foreign if not line.startswith(f"room {heir.id} ")], foreign[:3]


@dataclass(frozen=True)
class Kind:
    then: str
    defence: Defence
    control: bool = False


FEARED: Final = {
    *((transport, control) for transport in ("tcp", "cma") for control in ("unfenced", "believed")),
    ("cma", "unmoved"),
    (GPU, "unfenced"),
}
"""The controls that must corrupt. Over TCP all bytes go through the endpoint, and end with it."""
ON_GPU: Final = ("fenced", "killed", "unfenced")
"""Kinds of trials on a GPU. Its memory cannot be moved, so its process ends instead."""
REVOKE_AFTER_MS: Final = 50
KINDS: Final = {
    "fenced": Kind("continued", Defence()),
    "killed": Kind("killed", Defence()),
    "revoked": Kind("revoked", Defence(revoke_after_ms=REVOKE_AFTER_MS)),
    "reported": Kind("reported", Defence()),
    "believed": Kind("believed", Defence(), control=True),
    "unfenced": Kind("continued", Defence(fenced=False), control=True),
    "unmoved": Kind("revoked", Defence(revoke_after_ms=REVOKE_AFTER_MS, moving=False), control=True),
}


def trials(pair: WorkerTrio, kind: str, points: Iterable[str], draw: random.Random) -> LoopHistogram:
    """Run one trial of this kind at each point, and return the tally."""
    tally, then = LoopHistogram(), KINDS[kind].then
    pair.decode.ask("defend", *astuple(KINDS[kind].defence))
    for point in points:
        trial(pair, point, draw, then, tally)
    return tally


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.process.late_writes", description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--controls", type=int, default=10, help="trials of each control")
    parser.add_argument("--transport", choices=sorted(TRANSPORTS), action="append")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    report: dict[str, dict[str, LoopHistogram]] = {}
    for transport in given.transport or sorted(TRANSPORTS):
        report[transport] = {}
        with workers(transport) as pair:
            for name, kind in KINDS.items():
                times = given.controls if kind.control else given.times
                points = islice(cycle(POINTS[transport]), times)
                tally = trials(pair, name, points, random.Random(given.seed))
                report[transport][name] = tally
                sys.stderr.write(f"{transport} {name} {tally}\n")
    tallies = [
        (transport, kind, tally) for transport, kinds in report.items() for kind, tally in kinds.items()
    ]
    held = not any(tally.corrupted for _, kind, tally in tallies if not KINDS[kind].control)
    feared = all(tally.corrupted for transport, kind, tally in tallies if (transport, kind) in FEARED)
    if given.json:
        told = {
            name: {kind: asdict(tally) for kind, tally in kinds.items()} for name, kinds in report.items()
        }
        sys.stdout.write(json.dumps({"ok": held and feared, "seed": given.seed, **told}) + "\n")
    return 0 if held and feared else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
