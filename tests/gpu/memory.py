"""Part of the kit that transfers KV between processes: whole, in time, and never late.

Two processes over NIXL, as a prefill and a decode worker are. On a GPU another process's memory is not moved
to take it away (the worker ends instead), so that late writes are tried with the fence and without it.
"""

import ctypes
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Final

import torch

from baton.inference.remote_writes import OWNER, flush_for, writes_to
from baton.transfer.transfer_protocol import PutState, TransferError
from bench.pages.transfer_pair import MIB
from tests.gpu.findings import Finding
from tests.gpu.kit import Kit
from tests.process.late_writes import ON_GPU, POINTS, LoopHistogram, trials
from tests.process.pair import GPU, workers
from tests.transfer.puppet import Puppet

SENDER, RECEIVER = 0xA, 0xB
LENGTH: Final = 4 * MIB
PIECE: Final = 24_576
"""Bytes of a single page: one layer's keys and values of a small model."""
LARGE: Final = 256 * MIB
PATIENCE_S: Final = 60.0
FLUSHES: Final = 100
RUNS: Final = 5
TRIALS: Final = {"fenced": 6, "killed": 2, "unfenced": 2}
CERTAIN: Final = ("posting", "granted")
"""Points at which a sender is stopped before it writes."""


def run(kit: Kit) -> None:
    note = kit.findings.note
    homes = [(kit.device, kit.device)]
    if kit.on_gpu:
        homes += [(kit.device, "cpu"), ("cpu", kit.device)]
    for source, target in homes:
        note(
            f"bytes from {source} arrive whole on {target}, in scattered pieces",
            partial(_contents, kit, source, target),
            20,
        )
    if kit.on_gpu:
        note("what a network card writes is seen when it is said to be there", lambda f: _flush(kit, f))
    note("nothing lands after its sender was killed", lambda found: _killed(kit, found), 20)
    note("late writes", lambda found: _late(kit, found), 40)
    chunk, runs = ("0", RUNS) if kit.on_gpu else ("1", 3)
    note(
        "pages as prefill pushes them, beside a bare write",
        lambda found: _speed(kit, chunk, runs, found),
        30,
    )


@contextmanager
def _pair(kit: Kit, source: str, target: str, length: int) -> Iterator[tuple[Puppet, Puppet]]:
    """A sender that is connected to a receiver, and has written to it."""
    outputs = [kit.folder / f"{side}-{time.monotonic_ns()}.txt" for side in ("sender", "receiver")]
    sender = Puppet(SENDER, None, length, {}, outputs[0], source)
    receiver = Puppet(RECEIVER, None, length, {}, outputs[1], target)
    try:
        sender.ask("connect", receiver.endpoint())
        posted = sender.ask("put", receiver.incarnation, "kv", [(0, 0, 64)])
        assert _end(sender, posted) is PutState.DONE
        yield sender, receiver
    finally:
        sender.kill()
        receiver.kill()


def _end(sender: Puppet, posted: object) -> PutState:
    states: list[PutState] = []

    def ended() -> bool:
        states.append(sender.ask("poll", posted))
        return states[-1] is not PutState.PENDING

    _until(ended, "the put does not end")
    return states[-1]


def _until(holds: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up, what
        time.sleep(0.001)


def _contents(kit: Kit, source: str, target: str, found: Finding) -> None:
    """Pieces of one memory, each somewhere else in the other: what arrived is looked at byte by byte."""
    draw = random.Random(3)
    given = draw.randbytes(LENGTH)
    count = LENGTH // PIECE
    places = draw.sample(range(count), count)
    runs = [(at * PIECE, to * PIECE, PIECE) for at, to in enumerate(places)]
    expected = bytearray(LENGTH)
    for at, to, length in runs:
        expected[to : to + length] = given[at : at + length]
    with _pair(kit, source, target, LENGTH) as (sender, receiver):
        receiver.ask("write", bytes(LENGTH))
        sender.ask("write", given)
        assert _end(sender, sender.ask("put", receiver.incarnation, "kv", runs)) is PutState.DONE
        arrived = receiver.ask("read")
        assert [sender.end(), receiver.end()] == [0, 0], sender.said() + receiver.said()
    wrong = [to for _, to, length in runs if arrived[to : to + length] != expected[to : to + length]]
    found.detail = f"{len(runs)} pieces of {PIECE} bytes"
    assert not wrong, f"{len(wrong)} of {len(runs)} pieces are not what was sent, the first at {wrong[0]}"
    assert arrived == bytes(expected), "more was written than was sent"


def _killed(kit: Kit, found: Finding) -> None:
    with _pair(kit, kit.device, kit.device, LARGE if kit.on_gpu else 16 * MIB) as (sender, receiver):
        sender.ask("fill", 5)
        length = LARGE if kit.on_gpu else 16 * MIB
        sender.begin("put", receiver.incarnation, "kv", [(0, 0, length)])
        sender.kill()
        for _ in range(200):
            receiver.ask("progress")
            time.sleep(0.001)
        landed = receiver.ask("count", 5)
        receiver.ask("fill", 1)
        for _ in range(200):
            receiver.ask("progress")
            time.sleep(0.001)
        late = receiver.ask("count", 5)
        found.detail = f"{landed} of {length} bytes had landed before, {late} after"
        assert late == 0, f"{late} bytes landed after the sender was dead and the memory was used again"
        other = Puppet(0xC, None, MIB, {}, kit.folder / "other.txt", kit.device)
        try:
            other.ask("connect", receiver.endpoint())
            other.ask("fill", 9)
            try:
                posted = other.ask("put", receiver.incarnation, "kv", [(0, 0, MIB)])
            except TransferError as error:
                raise AssertionError(f"the receiver serves nobody any more: {error}") from error
            assert _end(other, posted) is PutState.DONE
            assert receiver.ask("count", 9) == MIB
        finally:
            other.kill()


def _late(kit: Kit, found: Finding) -> None:
    """The fence holds what its control shows to be in danger."""
    transport = GPU if kit.on_gpu else "cma"
    tallies: dict[str, LoopHistogram] = {}
    with workers(transport, device=kit.device) as pair:
        for kind in ON_GPU:
            points = POINTS[transport] if kind == "fenced" else CERTAIN
            cut = TRIALS[kind] if kit.on_gpu else len(CERTAIN) // 2
            chosen = [points[index % len(points)] for index in range(cut)]
            tallies[kind] = trials(pair, kind, chosen, random.Random(1))
    found.detail = "; ".join(
        f"{kind}: {each.corrupted} of {each.trials} rooms overwritten, {each.withheld} withheld"
        for kind, each in tallies.items()
    )
    assert not tallies["fenced"].corrupted, "with the fence a late write reached another room"
    assert not tallies["killed"].corrupted, "a dead sender's write reached another room"
    control = tallies["unfenced"]
    assert control.corrupted == control.trials, (
        f"the control shows no danger ({control.corrupted} of {control.trials}): writes end where it stopped"
    )


def _flush(kit: Kit, found: Finding) -> None:
    """Report the driver's answer, and the time of asking it before each step."""
    device, driver = torch.device(kit.device), ctypes.CDLL("libcuda.so.1")
    writes = writes_to(device, driver)
    found.figures = {"writes": asdict(writes)}
    flush = flush_for(device, driver)
    if flush is None:
        late = writes.supported and writes.ordering < OWNER
        found.detail = "it needs --kv-checksum pages" if late else "nothing is to be done"
        return
    started = time.perf_counter()
    for _ in range(FLUSHES):
        flush()
    found.figures["flush_us"] = round((time.perf_counter() - started) * 1e6 / FLUSHES, 1)
    found.detail = f"flushed by a call, {found.figures['flush_us']} us"


def _speed(kit: Kit, chunk: str, runs: int, found: Finding) -> None:
    told = kit.bench(
        "transfer", "--runs", str(runs), "--chunk", chunk, "--device", kit.device, "--json", most_s=90
    )
    equal = [each for each in told["cases"] if each["same_shape"] and each["pages"] == "scattered"]
    found.figures = {
        "device": told["device"],
        "ratio": told["ratio"],
        "gigabytes_s": {
            f"{each['chunk_mib']} MiB, pages of {each['page_tokens'][0]}": each["gigabytes_s"]["push"]
            for each in equal
        },
        "cases": told["cases"],
    }
    found.detail = ", ".join(f"{name}: {value} GB/s" for name, value in found.figures["gigabytes_s"].items())
