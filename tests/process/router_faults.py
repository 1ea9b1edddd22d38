"""Faults of three bootstraps over one pair of workers, by what the clients of their streams see.

`python -m tests.process.router_faults` runs all of them (20 minutes on two cores) and prints a JSON object;
`--table` prints the rows of docs/verification.md. Clients of OpenAI and Anthropic have 32 streams at a time.
Half of those are continued by `Last-Event-ID`. Each bootstrap is killed, and stopped by SIGTERM, in turn.
Then bootstraps are killed behind each event of a stream of each kind. Every stream has to be an undisturbed
one's, to the token. Afterwards every gauge has to be back where it was.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Final

import httpx

from baton.models.model_files import DEMO, prepare, resolve
from baton.runtime.model_options import LoadFormat
from tests.http import web
from tests.models.eight_heads import chatting_heads
from tests.process.official_clients import resuming
from tests.process.stack import Service, Stack, running_stack
from tests.process.stream_reader import ANSWER_S, Broken, StreamReader, refused_s
from tests.process.streamed_requests import KINDS, by_choice
from tests.process.streaming_load import Answer, StreamingLoad, answers, assert_same, check, clients_of

NAMES: Final = ("bootstrap", "bootstrap-1", "bootstrap-2")
SWEPT: Final = tuple(kind for kind, request in KINDS.items() if request.repeats)
"""Kinds of streams that are cut behind their events."""


def kill(service: Service) -> None:
    service.kill()


def terminate(service: Service) -> None:
    """Send SIGTERM, and wait until the streams of the bootstrap have ended."""
    assert service.stop() == 0, service.tail()


FAULTS: Final[Mapping[str, Callable[[Service], None]]] = {"SIGKILL": kill, "SIGTERM": terminate}


@dataclass
class Seen:
    """What the clients saw."""

    streams: int = 0
    """Streams that were read to their end."""
    continued: int = 0
    """Those of them that were continued."""
    cut: int = 0
    """Streams that ended with their bootstrap, and were not continued."""
    refused_s: float = 0.0
    """Longest time in seconds for which a request was refused."""
    adopted: int = 0
    """Rooms that another bootstrap adopted."""

    def add(self, other: "Seen") -> None:
        self.streams += other.streams
        self.continued += other.continued
        self.cut += other.cut
        self.refused_s = max(self.refused_s, other.refused_s)
        self.adopted += other.adopted


@dataclass(frozen=True)
class Routers:
    """Three bootstraps over one pair of workers, and what their clients have to read."""

    stack: Stack
    model: str
    """Name of the model in requests."""
    expected: Mapping[tuple[str, bool], Answer]

    @property
    def services(self) -> list[Service]:
        return [self.stack.services[name] for name in NAMES]

    def urls(self, first: int = 0) -> list[str]:
        """Return the base URLs of all bootstraps, from the one with this number on."""
        found = [each.http for each in self.services]
        return [*found[first:], *found[:first]]

    def restart(self, name: str) -> None:
        self.stack.restart(name)
        self.stack.wait_ready(url=self.stack.services[name].http)

    def events(self, kind: str) -> int:
        """Return the number of events of the answer to a request of this kind."""
        return sum(map(len, self.expected[kind, True].values()))

    def adopted(self) -> int:
        return int(self.stack.services["decode-0"].total("baton_rooms_adopted_total"))


@contextmanager
def running_routers(demo: Path, folder: Path) -> Iterator[Routers]:
    """Context of a ready stack. `demo`: directory of the demo model. `folder`: where a smaller one goes."""
    (folder / "key").write_text("a key that all bootstraps have\n")
    with running_stack(
        str(chatting_heads(folder / "model", demo)),
        bootstrap={"lease_ms": "3000", "reasoning_key_file": str(folder / "key")},
        bootstraps=len(NAMES),
        dtype="float32",
        kv_cache_memory="64MiB",
        orphan_ms="3000",
    ) as stack:
        model = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
        yield Routers(stack, model, answers(stack.url, model))


def disturb(routers: Routers, fault: str, names: Sequence[str] = NAMES) -> Seen:
    """Bring the fault upon each of these bootstraps in turn, under one load, and check all streams. Raises
    AssertionError."""
    stack, seen = routers.stack, Seen(adopted=-routers.adopted())
    start, faults = stack.idle_gauges(), list[float]()
    load = StreamingLoad(clients_of(routers.urls(), routers.model))
    with load.run():
        load.wait_begun()
        for name in names:
            url = stack.services[name].http
            load.wait_streaming(url)
            faults.append(time.monotonic())
            FAULTS[fault](stack.services[name])
            routers.restart(name)
            load.wait_begun()
            cut = load.cut[seen.cut :]
            assert all(fault == "SIGKILL" and each.broke_at == url for each in cut), "others' streams end"
            seen.cut += len(cut)
    assert len(load.cut) == seen.cut, "a stream ends without a fault"
    seen.streams = sum(len(each.whole) for each in load.clients)
    seen.continued = check(load.clients, routers.expected)
    if fault == "SIGKILL":
        assert seen.cut, "no kill comes in mid-stream"
        assert seen.continued, "no kill comes in mid-stream"
    else:
        assert not seen.continued, "a connection breaks"
    stack.wait_idle(start)
    seen.adopted += routers.adopted()
    seen.refused_s = refused_s(load.read(), faults)
    return seen


def kill_behind(routers: Routers, killed: int, cuts: Mapping[str, int], beside: Sequence[str] = ()) -> Seen:
    """Kill a bootstrap when its stream of each kind in `cuts` is behind an event. Check the streams, which go
    on at another. Raises AssertionError.

    `cuts`: number of the event, by kind. A stream whose tokens shared an event may end before that event.
    `beside`: kinds of streams that the kill cuts wherever they are.
    """
    service, seen = routers.services[killed], Seen(adopted=-routers.adopted())
    kill_once_all_are_there = threading.Barrier(len(cuts), service.kill, ANSWER_S)
    readers = {kind: StreamReader(resuming(KINDS[kind], routers.model)) for kind in (*cuts, *beside)}
    for kind, position in cuts.items():
        readers[kind].on_event = _cut_at(position, kill_once_all_are_there)

    def read(kind: str, reader: StreamReader) -> None:
        reader.run(routers.urls(killed))
        if kind in cuts and not reader.breaks:
            kill_once_all_are_there.wait()

    with ThreadPoolExecutor(len(readers)) as pool:
        running = [pool.submit(read, *each) for each in readers.items()]
        for each in running:
            each.result()
    for kind, reader in readers.items():
        assert kind in beside or reader.breaks == 1 or len(reader.events) < cuts[kind], kind
        assert reader.broke_at in ("", service.http), kind
        assert len(set(reader.ids)) == len(reader.ids), kind
        assert_same(by_choice(reader.events), routers.expected[kind, True], f"{kind} beside {cuts}")
    routers.restart(NAMES[killed])
    seen.streams, seen.continued = len(readers), sum(each.breaks > 0 for each in readers.values())
    seen.refused_s = refused_s(readers.values(), [])
    seen.adopted += routers.adopted()
    return seen


def _cut_at(position: int, wait: threading.Barrier) -> Callable[[StreamReader], None]:
    def cut(reader: StreamReader) -> None:
        if len(reader.events) == position and not reader.breaks:
            wait.wait()
            raise Broken("what came after this event is lost")

    return cut


@dataclass
class Row:
    """Result of one fault, over all of its runs."""

    fault: str
    runs: int = 0
    as_promised: int = 0
    """Runs without a problem."""
    seen: Seen = field(default_factory=Seen)
    problems: list[str] = field(default_factory=list)

    def run(self, once: Callable[[], Seen]) -> None:
        """Run the fault once more."""
        self.runs += 1
        self.as_promised += self.check(lambda: self.seen.add(once()))
        sys.stderr.write(json.dumps(asdict(self)) + "\n")

    def check(self, run: Callable[[], None]) -> bool:
        """Return whether `run` raises no error. Its error becomes a problem."""
        try:
            run()
        except (AssertionError, httpx.HTTPError, threading.BrokenBarrierError) as error:
            self.problems.append(str(error).partition("\n----")[0])
            return False
        return True

    def cells(self) -> str:
        """Return the row of docs/verification.md's table."""
        seen = self.seen
        numbers = (seen.streams, seen.continued, seen.adopted, seen.cut)
        told = (self.fault, f"{self.as_promised} of {self.runs}", *numbers, f"{seen.refused_s:.2f} s")
        return f"| {' | '.join(map(str, told))} |"


def sweep(routers: Routers, step: int) -> tuple[Row, Row]:
    """Kill bootstraps in turn behind every `step`-th event of the streams of SWEPT, all of which wait for the
    kill. Then kill them behind every tenth of those events of one stream, at once."""
    all_wait, at_once = Row("bootstrap SIGKILL, behind each event"), Row("the same, rooms going on")
    last, killed = {kind: routers.events(kind) - 1 for kind in SWEPT}, cycle(range(len(NAMES)))
    start = routers.stack.idle_gauges()
    for position in range(1, max(last.values()) + 1, step):
        cuts = {kind: position for kind in SWEPT if position <= last[kind]}
        all_wait.run(partial(kill_behind, routers, next(killed), cuts))
    all_wait.check(partial(routers.stack.wait_idle, start))
    for kind in SWEPT:
        beside = [each for each in SWEPT if each != kind]
        for position in range(1, last[kind] + 1, 10 * step):
            at_once.run(partial(kill_behind, routers, next(killed), {kind: position}, beside))
    at_once.check(partial(routers.stack.wait_idle, start))
    return all_wait, at_once


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.process.router_faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="faults of each bootstrap under 32 streams")
    parser.add_argument("--step", type=int, default=1, help="events between two kills of the sweep (0: none)")
    parser.add_argument("--table", action="store_true", help="rows of Markdown in place of JSON")
    args = parser.parse_args()
    rows = [Row(f"bootstrap {fault}") for fault in FAULTS]
    with tempfile.TemporaryDirectory(prefix="baton-routers-") as folder:
        demo = prepare(resolve(DEMO, LoadFormat.AUTO), lambda _: None)
        with running_routers(demo, Path(folder)) as routers:
            for row, fault in zip(rows, FAULTS, strict=True):
                for _ in range(args.rounds):
                    for name in NAMES:
                        row.run(partial(disturb, routers, fault, [name]))
            if args.step:
                rows.extend(sweep(routers, args.step))
    ok = not any(each.problems for each in rows)
    if args.table:
        sys.stdout.write("".join(f"{each.cells()}\n" for each in rows))
    else:
        sys.stdout.write(json.dumps({"faults": [asdict(each) for each in rows], "ok": ok}) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
