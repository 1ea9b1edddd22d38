"""Sender and receiver of measured transfers.

The receiver is another process with an endpoint for each rank. The sender is one rank with the product's
own plan and push. In turns with it, a bare NIXL agent writes as many bytes to the same memory: whole, in
descriptors of one size, or page by page like the push.

Each write takes other pages, so that no cache holds them. The first write of a row is reported apart. It
finds the caches without its code, which takes longer to fetch than to run.
"""

import multiprocessing
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from statistics import fmean
from typing import Any, Final

from baton.handover.route import Route, Target
from baton.ids import Generation, Incarnation, PageId
from baton.pages.layout import KvGroup, KvLayout, full_group
from baton.pages.rank_layout import rank_layout
from baton.pages.record import SLOT_BYTES
from baton.pages.transfer_plan import PageRun, plan_hand_over
from baton.prefill.room_transfer import RoomTransfer
from baton.rooms.evidence import Granted
from baton.runtime.host_memory import HostMemory
from baton.topology import Topology
from baton.transfer.nixl import NixlTransfer, nixl_memory
from baton.transfer.nixl_library import Library, unframed
from baton.transfer.transfer_protocol import Endpoint, Region, kv_region
from bench.pages.device_memory import copying, take
from bench.report import seconds_of

MIB: Final = 2**20
POOL_BYTES: Final = 128 * MIB
SENDER: Final = Incarnation(1)
RECEIVERS: Final = (Incarnation(2), Incarnation(3), Incarnation(4))
PIECES: Final = (0, MIB, MIB // 4)
"""Descriptor sizes of a bare write, in bytes. 0: one descriptor."""
AS_PUSHED: Final = "nixl as pushed"
"""Name of the bare write with the same descriptors as the push."""
GROUP: Final = full_group("bfloat16", 16, tuple(range(30)), (0, 1, 2), 64)
"""Page layout of SmolLM2-135M."""
WARM_UP: Final = 2

IN_A_ROW: Final = 4
"""Writes of one kind in a row."""

Seconds = dict[str, list[float]]
Work = Callable[[], Callable[[], None]]
"""Prepares a write, and returns the call that is measured."""


@dataclass(frozen=True, slots=True)
class Case:
    mib: int
    page_tokens: tuple[int, int] = (16, 16)
    tensor: tuple[int, int] = (1, 1)
    """Ranks of the sender and of the receiver. The sender's first rank is measured."""
    scattered: bool = True

    @property
    def facts(self) -> dict[str, object]:
        return {
            "chunk_mib": self.mib,
            "page_tokens": list(self.page_tokens),
            "tensor": list(self.tensor),
            "pages": "scattered" if self.scattered else "contiguous",
            "same_shape": len(set(self.page_tokens)) == len(set(self.tensor)) == 1,
        }


@dataclass(frozen=True, slots=True)
class TransferMeasurement:
    """Durations of the writes of one case, by kind."""

    case: Case
    length: int
    """Bytes of one write."""
    first: Seconds
    """Durations of writes that follow another kind."""
    next: Seconds
    """Durations of writes that follow their own kind, as means of one row."""


def cases(chunks: Sequence[int]) -> list[Case]:
    """Return the cases: equal shapes at every size, different shapes at the middle size."""
    equal = [
        Case(mib, (size, size), scattered=scattered)
        for mib in chunks
        for size in (16, 64)
        for scattered in (False, True)
    ]
    mib = chunks[len(chunks) // 2]
    tensor = [Case(mib, tensor=each) for each in ((1, 3), (3, 1), (3, 3))]
    return [*equal, *tensor, Case(mib, (64, 16)), Case(mib, (16, 64))]


def measure(
    each: Sequence[Case], runs: int, window_bytes: int, patience_s: float, device: str = "cpu"
) -> list[TransferMeasurement] | None:
    """Measure all cases, with all kinds of writes in turns. Returns None if the receiver did not answer.
    `device`: "cpu" or "cuda:N", of both memories."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    peer = context.Process(target=_receive, args=(theirs, device), daemon=True)
    peer.start()
    try:
        if not mine.poll(patience_s):
            return None
        sender = _Sender(mine.recv(), window_bytes, device)
        try:
            return sender.measure(each, runs)
        finally:
            mine.send("done")
            sender.close()
    finally:
        peer.join(patience_s)
        peer.kill()


class _Sender:
    def __init__(self, endpoints: Sequence[Endpoint], window_bytes: int, device: str) -> None:
        self._window_bytes = window_bytes
        self._peers = endpoints
        self._memory, self._copy = take(POOL_BYTES, device), take(POOL_BYTES, device)
        self._slots = HostMemory(SLOT_BYTES)
        self._transfer = NixlTransfer(SENDER)
        self._transfer.register(Region(kv_region(0), self._memory.address, POOL_BYTES, device))
        self._transfer.endpoint()
        for endpoint in endpoints:
            self._transfer.connect(endpoint)
        self._bare = _BareNixl(self._memory.address, endpoints[0], device)
        self._random = random.Random(2)  # noqa: S311 the same orders in every run of the command

    def measure(self, cases: Sequence[Case], runs: int) -> list[TransferMeasurement]:
        scenes = [_Scene(case, self._peers) for case in cases]
        measured = [TransferMeasurement(scene.case, scene.bytes, {}, {}) for scene in scenes]
        for run in range(WARM_UP + runs):
            for scene, told in zip(scenes, measured, strict=True):
                works = list(self._works(scene).items())
                self._random.shuffle(works)
                for key, make in works:
                    first, *others = [make() for _ in range(IN_A_ROW)]
                    spent = [seconds_of(write) for write in (first, *others)]
                    if run >= WARM_UP:
                        told.first.setdefault(key, []).append(spent[0])
                        told.next.setdefault(key, []).append(fmean(spent[1:]))
        return measured

    def close(self) -> None:
        self._bare.close()
        self._transfer.close()

    def _works(self, scene: "_Scene") -> dict[str, Work]:
        def push() -> Callable[[], None]:
            return partial(_push, scene.push(self._transfer, self._window_bytes, self._slots), scene.tokens)

        works: dict[str, Work] = {
            "push": push,
            AS_PUSHED: lambda: self._bare.write(scene.runs()),
            "memcpy": lambda: copying(self._memory, scene.place(), self._copy, scene.place(), scene.bytes),
        }
        for piece in PIECES:
            if piece < scene.bytes:
                key = f"nixl in {piece // 1024} KiB" if piece else "nixl whole"
                works[key] = partial(self._pieces, scene, piece or scene.bytes)
        return works

    def _pieces(self, scene: "_Scene", size: int) -> Callable[[], None]:
        at, to = scene.place(), scene.place()
        return self._bare.write(
            [
                (at + start, to + start, min(size, scene.bytes - start))
                for start in range(0, scene.bytes, size)
            ]
        )


def _push(push: RoomTransfer, tokens: int) -> None:
    push.ready(tokens, complete=True)
    while not push.written:
        push.advance(lambda _: None)
        if push.failure is not None:
            raise RuntimeError(push.failure)


class _Scene:
    """Plan of a case, and the pages of its next run."""

    def __init__(self, case: Case, peers: Sequence[Endpoint]) -> None:
        self.case = case
        mine, theirs = (
            [
                rank_layout(
                    KvLayout("bench", (replace(GROUP, page_tokens=size),)), Topology(tensor=ranks), rank
                )
                for rank in range(ranks)
            ]
            for size, ranks in zip(case.page_tokens, case.tensor, strict=True)
        )
        ((self._source,), (self._target,)) = mine[0].groups, theirs[0].groups
        plan = plan_hand_over(mine, theirs)
        targets = tuple(
            Target(peer.incarnation, plan.between(0, rank), theirs[rank].heads)
            for rank, peer in enumerate(peers[: len(theirs)])
        )
        self._route = Route(peers[0].incarnation, (self._target.page_tokens,), targets)
        whole = max(case.page_tokens)
        self.tokens = -(-case.mib * MIB // (self._source.token_bytes * whole)) * whole
        self.bytes = self.tokens * self._source.token_bytes
        self._random = random.Random(1)  # noqa: S311 the same pages in every run of the command

    def push(self, transfer: NixlTransfer, window_bytes: int, slots: HostMemory) -> RoomTransfer:
        source = self._table(self._source)
        grant = Granted(Generation(1), (self._table(self._target),), slot=0)
        size = self._source.page_tokens
        return RoomTransfer(transfer, self._route, (source,), size, grant, window_bytes, slots.view, 0)

    def runs(self) -> list[PageRun]:
        """Return the writes of a push: by target, and as if the first target had all of it."""
        source, target = self._table(self._source), self._table(self._target)
        return [
            run
            for each in self._route.targets
            for group in each.plan.runs((source,), (target,), 0, 0, self.tokens, ends=True)
            for run in group
        ]

    def place(self) -> int:
        """Return a start for a contiguous write of as many bytes."""
        return self._random.randrange(POOL_BYTES // self.bytes) * self.bytes

    def _table(self, group: KvGroup) -> tuple[PageId, ...]:
        count, pool = group.pages_for(self.tokens), POOL_BYTES // group.page_bytes
        if self.case.scattered:
            return tuple(map(PageId, self._random.sample(range(pool), count)))
        first = self._random.randrange(pool - count + 1)
        return tuple(map(PageId, range(first, first + count)))


class _BareNixl:
    """NIXL agent without the product's code. It prepares each write anew, as the product has to."""

    def __init__(self, address: int, peer: Endpoint, device: str) -> None:
        self._agent: Any = Library().new_agent("bench-bare")
        self._source, self._target = address, peer.regions[0].address
        self._kind, self._device = nixl_memory(device)
        self._registration = self._agent.register_memory(
            [(address, POOL_BYTES, self._device, "")], mem_type=self._kind
        )
        self._peer = self._agent.add_remote_agent(unframed(peer)).decode()
        self._agent.make_connection(self._peer)

    def write(self, runs: Sequence[PageRun]) -> Callable[[], None]:
        source, target, agent = self._source, self._target, self._agent
        kind, number = self._kind, self._device

        def write() -> None:
            local = agent.get_xfer_descs([(source + at, size, number) for at, _, size in runs], mem_type=kind)
            remote = agent.get_xfer_descs(
                [(target + to, size, number) for _, to, size in runs], mem_type=kind
            )
            handle = agent.initialize_xfer("WRITE", local, remote, self._peer)
            status = agent.transfer(handle)
            while status != "DONE":
                status = agent.check_xfer_state(handle)
            handle.release()

        return write

    def close(self) -> None:
        self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registration)


def _receive(pipe: Connection, device: str) -> None:
    """Run the receiver's process until the pipe ends it."""
    memory = take(POOL_BYTES, device)
    ranks = [NixlTransfer(incarnation) for incarnation in RECEIVERS]
    for rank in ranks:
        rank.register(Region(kv_region(0), memory.address, memory.length, device))
    pipe.send([rank.endpoint() for rank in ranks])
    while not pipe.poll(0.001):
        for rank in ranks:
            rank.progress()
    for rank in ranks:
        rank.close()
