"""Which workers are there, which rooms are open on them, and what has each room been through?

The bootstrap's own state. Pure: time is an argument, randomness is injected, the caller performs calls.
Room ids come from here and from nowhere else (`room-issued`): a counter that starts at a random place, so
that no id is used twice (`room-unique`), none repeats after a restart but by a chance of 2^-30, and none
carries placement.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from services.rooms.affinity import Block, blocks
from services.rooms.entries import Event, RoomEntry, RoomPhase, Worker, WorkerFacts, WorkerState
from services.rooms.errors import (
    Cause,
    NameInUse,
    NoCapacity,
    NoSuchWorker,
    Reason,
    UnknownRoom,
    UnknownWorker,
    WorkerRefused,
)
from services.rooms.ids import Incarnation, RoomId
from services.rooms.index import RoomIndex
from services.rooms.phases import Side

__all__ = ["Event", "Registry", "RoomEntry", "RoomPhase", "Worker", "WorkerFacts", "WorkerState"]

EVENTS_PER_ROOM_MAX = 256
DEPARTED_MAX = 1024
CLOSING_MS = 60_000
"""How long an ended room waits for its workers to report it retired before it is filed without."""
OPEN_MS_MAX = 4 * 3_600_000
"""How long a room may be open. Above every phase's deadline on the workers: it ends rooms whose opener
is gone (`room-ends`)."""
UNTOLD_MS = 10_000
"""How long a room that both workers gave back waits for its opener to say how it ended."""
OVERLOADED: Final = 1 / 8
"""How much more of its cache than of the least loaded worker's may be spoken for, where a worker is preferred
for the beginning of a prompt that it was sent before."""
NOT_FAILURES = frozenset({Reason.CLIENT_GONE, Reason.ANSWERED})
"""Reasons for which an ended room is not kept among the failed ones."""


class Registry:
    """Workers by incarnation and rooms by id. Bounded: open rooms by the workers' own limits, kept ones
    by `kept` and `failed_kept`."""

    def __init__(self, model: str, first_room: int, lease_ms: int, kept: int, failed_kept: int) -> None:
        """`model`: fingerprint that every worker must have. `first_room`: random, 1 <= it < 2^62."""
        self.model = model
        self._next_room = first_room
        self.lease_ms = lease_ms
        self._kept = kept
        self._failed_kept = failed_kept
        self._workers: dict[Incarnation, Worker] = {}
        self._open: dict[RoomId, RoomEntry] = {}
        self._done: OrderedDict[RoomId, RoomEntry] = OrderedDict()
        self._failed: OrderedDict[RoomId, RoomEntry] = OrderedDict()
        self.index = RoomIndex()
        """Of all these rooms, for whoever looks at them."""
        self._silent: OrderedDict[Incarnation, WorkerFacts] = OrderedDict()
        """Workers whose lease ran out and of whom nothing more is known."""
        self._departed: OrderedDict[Incarnation, str] = OrderedDict()

    # ---- workers

    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def worker(self, incarnation: Incarnation) -> Worker:
        if incarnation not in self._workers:
            raise UnknownWorker(f"incarnation {incarnation} holds no lease")
        return self._workers[incarnation]

    def side_of(self, incarnation: Incarnation) -> Side | None:
        """Of a worker that holds its lease or fell silent; None for any other."""
        worker = self._workers.get(incarnation)
        facts = self._silent.get(incarnation) if worker is None else worker.facts
        return None if facts is None else facts.side

    def silent(self, name: str) -> list[Incarnation]:
        """Those of the name whose lease ran out: its next holder is the proof that they are gone."""
        return [each for each, facts in self._silent.items() if facts.name == name]

    def register(self, facts: WorkerFacts, now_ms: int) -> None:
        """Enter a worker. Raises WorkerRefused naming the field that differs from the stack's,
        NameInUse while another incarnation of the name holds its lease."""
        if facts.model != self.model:
            raise WorkerRefused("model", self.model, facts.model)
        if facts.incarnation in self._departed:
            raise UnknownWorker(f"incarnation {facts.incarnation} was declared gone: restart the worker")
        for other in self._workers.values():
            if other.facts.incarnation == facts.incarnation:
                continue
            if other.facts.name == facts.name:
                left_ms = max(other.lease_until_ms - now_ms, 0)
                raise NameInUse(
                    f"{facts.name} is held by incarnation {other.facts.incarnation} for {left_ms} ms"
                )
            _check_fit(other.facts, facts)
        known = self._workers.get(facts.incarnation)
        if known is None:
            self._workers[facts.incarnation] = Worker(facts, now_ms + self.lease_ms)
            self._silent.pop(facts.incarnation, None)
            self._supersede(facts)
        else:
            known.lease_until_ms = now_ms + self.lease_ms

    def renew(self, incarnation: Incarnation, now_ms: int) -> None:
        worker = self.worker(incarnation)
        worker.lease_until_ms = now_ms + self.lease_ms
        if worker.state is WorkerState.SUSPECT:
            worker.state = WorkerState.READY if worker.proven else WorkerState.JOINING

    def proven(self, incarnation: Incarnation) -> None:
        """A canary hand-over passed through this worker."""
        worker = self._workers.get(incarnation)
        if worker is not None:
            worker.proven = True
            if worker.state is WorkerState.JOINING:
                worker.state = WorkerState.READY

    def suspect(self, incarnation: Incarnation) -> None:
        worker = self._workers.get(incarnation)
        if worker is not None and worker.state is not WorkerState.DRAINING:
            worker.state = WorkerState.SUSPECT

    def drain(self, incarnation: Incarnation) -> None:
        self.worker(incarnation).state = WorkerState.DRAINING

    def leave(self, incarnation: Incarnation, proof: str | None) -> list[RoomEntry]:
        """Remove a worker. `proof`: how its process is known to be gone, or None for a mere silence, which
        ends its rooms but proves nothing. Returns its open rooms: the caller ends them. A process that is
        gone holds nothing, so no report of its rooms is waited for."""
        worker = self._workers.pop(incarnation, None)
        entries = [] if worker is None else [self._open[room] for room in sorted(worker.rooms)]
        if proof is not None:
            self._depart(incarnation, proof)
        elif worker is not None:
            _remember(self._silent, incarnation, worker.facts, DEPARTED_MAX)
        return [entry for entry in entries if entry.phase is not RoomPhase.RETIRED]

    def exited(self, name: str, pid: int) -> list[Incarnation]:
        """Whoever started process `pid` as worker `name` saw it exit. Returns the incarnations that were
        it: a report that comes late says nothing about the name's next holder (`incarnation`)."""
        held = {each: worker.facts for each, worker in self._workers.items()}
        known = self._silent | held
        return [each for each, facts in known.items() if pid and (facts.name, facts.pid) == (name, pid)]

    def expired(self, now_ms: int) -> list[Incarnation]:
        """Workers whose lease has run out: `leave` them."""
        return [each for each, worker in self._workers.items() if worker.lease_until_ms <= now_ms]

    def departed(self) -> list[Incarnation]:
        """Processes that are known to be gone, latest last, at most DEPARTED_MAX."""
        return list(self._departed)

    # ---- rooms

    def place(
        self,
        prompt_tokens: int,
        tokens: int,
        only: Iterable[Incarnation] = (),
        avoid: Collection[Incarnation] = (),
        prompt: Sequence[Block] = (),
    ) -> tuple[Worker, Worker]:
        """A pair that can hold the request: on each side the worker that was sent most of the beginning of
        `prompt` before, unless it is OVERLOADED, and else the least loaded one. Raises NoSuchWorker, which
        waiting does not mend, before NoCapacity, which it does.

        `only`: incarnations to choose among whatever their state, for a canary. `avoid`: those that get the
        request only if their side has no other that could hold it, be it full now: a worker that fails
        everything at once always has a free place.
        """
        chosen = set(only)
        prefill = self._able(Side.PREFILL, prompt_tokens, chosen)
        decode = self._able(Side.DECODE, tokens, chosen)
        return _best(_without(prefill, avoid), prompt), _best(_without(decode, avoid), prompt)

    def blocks(self, prompt: Sequence[int]) -> tuple[Block, ...]:
        """By which a worker is chosen; none where there is nothing to choose."""
        sides = [worker.facts.side for worker in self._workers.values()]
        return blocks(prompt) if len(sides) > len(set(sides)) else ()

    def open_room(
        self,
        request_id: str,
        pair: tuple[Worker, Worker],
        tokens: int,
        now_ms: int,
        *,
        canary: bool = False,
        retry_of: RoomId | None = None,
        prompt: Sequence[Block] = (),
        trace_id: str = "",
    ) -> RoomEntry:
        room = self._fresh_id()
        prefill, decode = pair
        entry = RoomEntry(
            room, request_id, prefill.facts, decode.facts, tokens, now_ms, canary, retry_of, trace_id
        )
        self._open[room] = entry
        self.index.opened(entry)
        for worker in pair:
            worker.rooms.add(room)
            worker.tokens += tokens
            worker.sent.add(prompt)
        return entry

    def get(self, room: RoomId) -> RoomEntry:
        for table in (self._open, self._done, self._failed):
            if room in table:
                return table[room]
        raise UnknownRoom(f"room {room} is not known here")

    def find(self, request_id: str) -> list[RoomEntry]:
        """Rooms of one request id, exactly, newest first: those of its retries, and a client may reuse it."""
        return list(self.index.named(request_id))

    def has_canary(self, worker: Worker) -> bool:
        """Does it hold a canary's room?"""
        return any(self._open[room].canary for room in worker.rooms)

    def rooms(self) -> Iterator[RoomEntry]:
        """Newest first: the open ones, then the kept ones."""
        for table in (self._open, self._done, self._failed):
            yield from reversed(table.values())

    def known_count(self) -> int:
        return len(self._open) + len(self._done) + len(self._failed)

    def open_count(self) -> int:
        return len(self._open)

    def record(self, room: RoomId, event: Event) -> bool:
        """Add a line to a room's timeline; a room that is not known gets none."""
        try:
            entry = self.get(room)
        except UnknownRoom:
            return False
        if len(entry.events) >= EVENTS_PER_ROOM_MAX:
            entry.events_dropped += 1
        else:
            entry.events.append(event)
        return True

    def streaming(self, room: RoomId) -> None:
        entry = self._open.get(room)
        if entry is not None and entry.phase is RoomPhase.OPEN:
            entry.phase = RoomPhase.STREAMING

    def end(self, room: RoomId, cause: Cause | None, now_ms: int) -> bool:
        """The room's outcome: None for an answered request. The first one is kept. False if it had one."""
        entry = self._open.get(room)
        if entry is None or entry.phase is RoomPhase.CLOSING:
            return False
        entry.phase = RoomPhase.CLOSING
        entry.closing_ms = now_ms
        entry.cause = cause
        if cause is not None and cause.reason not in NOT_FAILURES:
            self.index.failed(entry)
        self._file_if_retired(entry)
        return True

    def side_retired(self, room: RoomId, side: Side) -> None:
        """One worker gave back everything it held for the room. Unknown rooms are ignored."""
        entry = self._open.get(room)
        if entry is None:
            return
        entry.waiting_for.discard(side)
        self._unload(entry, side)
        self._file_if_retired(entry)

    def unended(self, now_ms: int) -> list[RoomEntry]:
        """Rooms whose opener is gone: open for OPEN_MS_MAX, or given back by both workers UNTOLD_MS ago.
        `end` them, and cancel them on their workers."""
        late = []
        for entry in self._open.values():
            if entry.phase is RoomPhase.CLOSING:
                continue
            if not entry.waiting_for and entry.untold_ms is None:
                entry.untold_ms = now_ms
            untold = entry.untold_ms is not None and now_ms >= entry.untold_ms + UNTOLD_MS
            if untold or now_ms >= entry.opened_ms + OPEN_MS_MAX:
                late.append(entry)
        return late

    def overdue(self, now_ms: int) -> list[RoomEntry]:
        """Ended rooms whose workers did not report in time: `abandon` them."""
        return [
            entry
            for entry in self._open.values()
            if entry.phase is RoomPhase.CLOSING and now_ms >= entry.closing_ms + CLOSING_MS
        ]

    def abandon(self, room: RoomId) -> None:
        """File an ended room although a worker never reported it retired. Unknown rooms are ignored."""
        entry = self._open.get(room)
        if entry is None:
            return
        for side in [each for each in Side if each in entry.waiting_for]:
            self.side_retired(room, side)

    # ---- inside

    def _able(self, side: Side, tokens: int, only: set[Incarnation]) -> list[Worker]:
        """Workers of a side that could ever hold so many tokens, at least one."""
        role = [worker for worker in self._workers.values() if worker.facts.side is side]
        if only:
            ready = [worker for worker in role if worker.facts.incarnation in only]
        else:
            ready = [worker for worker in role if worker.state is WorkerState.READY]
        if not ready:
            raise NoSuchWorker(f"no {side.value} worker is ready")
        able = [worker for worker in ready if worker.facts.tokens_max >= tokens]
        if not able:
            largest = max(worker.facts.tokens_max for worker in ready)
            raise NoSuchWorker(
                f"no {side.value} worker can hold {tokens} tokens: the largest holds {largest}"
            )
        return able

    def _fresh_id(self) -> RoomId:
        room = RoomId(self._next_room)
        self._next_room += 1
        return room

    def _unload(self, entry: RoomEntry, side: Side) -> None:
        worker = self._workers.get(entry.worker(side).incarnation)
        if worker is not None and entry.id in worker.rooms:
            worker.rooms.discard(entry.id)
            worker.tokens -= entry.tokens

    def _file_if_retired(self, entry: RoomEntry) -> None:
        if entry.phase is not RoomPhase.CLOSING or entry.waiting_for:
            return
        del self._open[entry.id]
        entry.phase = RoomPhase.RETIRED
        failed = entry.cause is not None and entry.cause.reason not in NOT_FAILURES
        table, limit = (self._failed, self._failed_kept) if failed else (self._done, self._kept)
        for forgotten in _remember(table, entry.id, entry, limit):
            self.index.forgotten(forgotten)

    def _supersede(self, facts: WorkerFacts) -> None:
        """A name's next holder registered: the platform starts one only after the last has exited."""
        for gone, silent in list(self._silent.items()):
            if silent.name == facts.name:
                del self._silent[gone]
                self._depart(gone, "replaced")

    def _depart(self, incarnation: Incarnation, proof: str) -> None:
        """A process that is gone holds nothing: no report of its rooms is waited for any more."""
        self._silent.pop(incarnation, None)
        _remember(self._departed, incarnation, proof, DEPARTED_MAX)
        for entry in list(self._open.values()):
            for side in Side:
                if entry.worker(side).incarnation == incarnation:
                    self.side_retired(entry.id, side)


K = TypeVar("K")
V = TypeVar("V")


def _remember(table: OrderedDict[K, V], key: K, value: V, limit: int) -> list[V]:
    """Enter into a bounded table. Returns what made room: the oldest."""
    table[key] = value
    return [table.popitem(last=False)[1] for _ in range(len(table) - limit)]


def _without(able: list[Worker], avoid: Collection[Incarnation]) -> list[Worker]:
    """Those that are not to be avoided, if there are any."""
    return [worker for worker in able if worker.facts.incarnation not in avoid] or able


def _best(able: list[Worker], prompt: Sequence[Block]) -> Worker:
    """Of those with a free place that are not overloaded, the one that was sent most of the prompt; of those
    the one with the smallest share of its cache spoken for."""
    free = [worker for worker in able if len(worker.rooms) < worker.facts.rooms_max]
    if not free:
        side = able[0].facts.side.value
        raise NoCapacity(f"every {side} worker holds as many rooms as it may")
    most = min(worker.load for worker in free) + OVERLOADED
    near = [worker for worker in free if worker.load <= most]
    return min(near, key=lambda worker: (-worker.sent.tokens(prompt), worker.load, worker.facts.name))


def _check_fit(known: WorkerFacts, new: WorkerFacts) -> None:
    want, got = dict(known.geometry), dict(new.geometry)
    for name in sorted(want.keys() | got.keys()):
        if want.get(name) != got.get(name):
            raise WorkerRefused(name, want.get(name, "none"), got.get(name, "none"))
    small, large = sorted((known.page_tokens, new.page_tokens))
    if large % small:
        told = f"{new.page_tokens}: neither is a multiple"
        raise WorkerRefused("page_tokens", str(known.page_tokens), told)
