"""Registry: registered workers and the rooms on them, the router's own state.

It is pure: time is an argument, randomness is injected, and the caller makes the calls to workers.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from baton.fleet.need import Need
from baton.fleet.placement import Pair, choose_reserved, place, place_retracted, uncached_tokens
from baton.fleet.room_entry import RoomEntry, RoomPhase
from baton.fleet.room_table import RoomTable, remember
from baton.fleet.stack_model import StackModel
from baton.fleet.worker_record import Worker, WorkerState
from baton.fleet.worker_table import DEPARTED_MAX, WorkerTable
from baton.ids import Incarnation, RoomId
from baton.pages.block_hashes import Block
from baton.pages.kv_event_log import KvEvents, KvSnapshotPart
from baton.rooms.errors import (
    NoCapacity,
    NoSuchWorker,
)
from baton.rooms.phases import Side
from baton.rooms.worker_facts import WorkerFacts
from baton.rooms.worker_load import WorkerLoad

GOODBYE: Final = "left"
"""Proof that a worker is gone: the worker itself called Leave."""


class Registry(WorkerTable, RoomTable):
    """Registered workers by incarnation, and rooms by id. Open rooms are bounded by the workers' own limits,
    ended ones by `done_max` and `failed_max`."""

    def __init__(
        self,
        model: str,
        first_room: int,
        lease_ms: int,
        done_max: int,
        failed_max: int,
        context_length: int = 0,
        *,
        weights_known: bool = True,
    ) -> None:
        """Make a registry without workers and rooms.

        `model`, `context_length`, `weights_known`: as in `StackModel`. `first_room`: first room id, random,
        at least 1 and below 2^62. `done_max`, `failed_max`: most ended rooms that are remembered, answered
        and failed ones.
        """
        WorkerTable.__init__(self, StackModel(model, context_length, weights_known), lease_ms)
        RoomTable.__init__(self, first_room, done_max, failed_max)
        self._reserved: list[Worker] = []
        """Decode workers that are reserved during the present scan of the queue, each for one request."""

    def update_load(self, incarnation: Incarnation, load: WorkerLoad, now_ms: int) -> bool:
        """Process a worker's report of its load. Return whether the worker has more space than was assumed,
        so that a waiting request may fit now.

        A decode worker's report with the wrong number of KV groups is ignored.
        """
        worker = self._workers.get(incarnation)
        if worker is None:
            return False
        # An id above all that were issued here comes from an earlier process of the router.
        entered = load.entered if load.entered < self._next_room else RoomId(0)
        side, more = worker.facts.side, worker.note_others(load)

        def is_brought(room: RoomId) -> bool:
            return side not in self._open[room].undelivered

        if side is Side.PREFILL:
            worker.queue.update(load, entered, is_brought, now_ms)
        elif worker.usage.fits(load):
            more |= worker.usage.update(load, entered, is_brought)
        self._loaded(worker)
        return more

    def drain(self, incarnation: Incarnation, paused: int = 0) -> int:
        """Give a worker no new rooms. Return how many rooms and requests it has to wait for; at 0, it gets
        none any more.

        These are its open rooms, and the `paused` requests whose rooms it retracted and which may have to go
        on there.
        """
        worker = self.worker(incarnation)
        worker.state = WorkerState.DRAINING
        awaited = len(worker.rooms) + paused
        worker.dismissed = not awaited
        self._changed(worker)
        return awaited

    def leave(self, incarnation: Incarnation, proof: str | None, now_ms: int) -> list[RoomEntry]:
        """Remove a worker. Return its open rooms, which the caller has to end.

        Local rooms, whose prompt decode computes, go on without their prefill worker. `proof`: how its
        process is known to be gone. None means that the worker is only silent: its rooms end, but it may
        still hold memory. A process that is gone holds none, so no report of its rooms is awaited.
        """
        worker = self._workers.pop(incarnation, None)
        self.pairs.forget(incarnation)
        if worker is not None and proof != GOODBYE:
            self._expect(worker, now_ms)
        if worker is not None:
            del self._leases[incarnation], self._names[worker.facts.name]
            self.sides[worker.facts.side].remove(worker)
            self._unlink_twin(worker)
        entries = [] if worker is None else [self._open[room] for room in sorted(worker.rooms)]
        if proof is not None:
            self._depart(incarnation, proof)
        elif worker is not None:
            remember(self._silent, incarnation, worker.facts, DEPARTED_MAX)
        return [
            entry for entry in entries if entry.phase is not RoomPhase.RETIRED and entry.needs(incarnation)
        ]

    def place(self, need: Need, avoid: Collection[Incarnation] = (), back: Incarnation | None = None) -> Pair:
        """Return the best pair of workers for a request, or a decode worker alone (`baton.fleet.placement`).

        `avoid`: incarnations that get it only if there are no others. `back`: decode worker that retracted
        the request's room. If no other worker has space, it gets the request even while it drains. Raises
        NoSuchWorker, and NoCapacity if waiting helps.
        """
        try:
            return place(self.sides, need, avoid, self.pairs)
        except (NoCapacity, NoSuchWorker) as lacks:
            worker = None if back is None else self._workers.get(back)
            if worker is None or not worker.accepts_retracted:
                raise
            try:
                return place_retracted(self.sides, need, worker, avoid, self.pairs)
            except NoSuchWorker:
                raise lacks from None
            except NoCapacity as full:
                raise (lacks if isinstance(lacks, NoCapacity) else full) from None

    def record_computed(self, incarnation: Incarnation, blocks: Sequence[Block]) -> None:
        """Record that a worker has computed a prefix of a request, and may still have it cached."""
        worker = self._workers.get(incarnation)
        if worker is not None:
            self.sides[worker.facts.side].record_sent(worker, blocks)

    def read_kv_log(self, incarnation: Incarnation, message: KvEvents | KvSnapshotPart) -> bool:
        """Take a message of a worker's KV event log. Return whether the router now has the worker's whole set
        of cached blocks. If not, it needs a snapshot (`log-is-tree`)."""
        worker = self._workers.get(incarnation)
        if worker is None:
            return False
        log = worker.kv_log
        change = log.read_events(message) if isinstance(message, KvEvents) else log.read_part(message)
        self.sides[worker.facts.side].apply_log(worker, change)
        return log.is_current

    def reserve(
        self, need: Need, avoid: Collection[Incarnation] = (), before: Incarnation | None = None
    ) -> Incarnation | None:
        """Reserve a decode worker for a request that fits on none now. Return its incarnation, or None.

        No other request is placed on it until `release_reserved`. `before`: the worker that the last scan
        reserved for the request.
        """
        was = None if before is None else self._workers.get(before)
        worker = choose_reserved(self.sides, need, avoid, self.pairs, was)
        if worker is None:
            return None
        self._reserved.append(worker)
        self._reserve(worker, reserved=True)
        return worker.facts.incarnation

    def release_reserved(self) -> None:
        while self._reserved:
            self._reserve(self._reserved.pop(), reserved=False)

    def open_room(
        self,
        request_id: str,
        pair: Pair,
        need: Need,
        now_ms: int,
        *,
        canary: bool = False,
        retry_of: RoomId | None = None,
        trace_id: str = "",
        is_back: bool = False,
    ) -> RoomEntry:
        """Open a room on a pair of workers. If the pair has no prefill worker, decode computes the prompt."""
        room = self._fresh_id()
        prefill, decode = pair
        entry = RoomEntry(
            room,
            request_id,
            None if prefill is None else prefill.facts,
            decode.facts,
            need.prompt_tokens if prefill is None else uncached_tokens(prefill, need),
            need.initial_on(decode.facts),
            now_ms,
            canary,
            retry_of,
            trace_id,
            choices=need.choices,
            is_returned=is_back,
            is_same_process=prefill is None and decode.twin is not None and decode.twin.is_serving,
        )
        self._enter_room(entry, now_ms)
        if prefill is not None:
            cost = prefill.queue.cost(entry.prompt_tokens, need.scores)
            prefill.queue.add(room, cost, now_ms)
            # A canary has to prove a hand-over. Decode computes no prompt itself without this time.
            entry.prefill_ms = None if canary else prefill.queue.left_ms(now_ms)
            entry.prefill_own_ms = prefill.queue.duration_ms(cost)
        for worker in (decode,) if prefill is None else (prefill, decode):
            worker.rooms.add(room)
            if canary:
                worker.canaries.add(room)
            worker.usage.unreported.add(room, entry.tokens_on(worker.facts.side))
            self._loaded(worker)
            new = self.sides[worker.facts.side].record_sent(worker, need.blocks)
            if worker is prefill:
                entry.uncomputed_blocks = worker.sent_prefixes.expect(need.blocks, new)
        return entry

    def adopt_room(
        self,
        room: RoomId,
        request_id: str,
        decode: Incarnation,
        prefill: Incarnation,
        need: Need,
        now_ms: int,
        trace_id: str = "",
    ) -> RoomEntry | None:
        """Enter a room of another router that this one wants to adopt. Return None if the room is known here,
        or its decode worker is not.

        `prefill`: prefill worker of the room, or NO_PEER. The loads that the workers report include the room
        already.
        """
        here, other = self._workers.get(decode), self._workers.get(prefill)
        if here is None or any(room in table for table in self._tables):
            return None
        entry = RoomEntry(
            room,
            request_id,
            None if other is None else other.facts,
            here.facts,
            need.prompt_tokens,
            need.initial_on(here.facts),
            now_ms,
            trace_id=trace_id,
            choices=need.choices,
        )
        self._enter_room(entry, now_ms)
        for worker in (here,) if other is None else (other, here):
            worker.rooms.add(room)
            self._loaded(worker)
        return entry

    def mark_local(self, room: RoomId) -> None:
        """Record that the decode worker of a room computes the prompt itself, so that the prefill worker has
        no part of the room."""
        entry = self._open.get(room)
        if entry is None or entry.prefill is None or entry.is_local:
            return
        entry.is_local = True
        worker = self._workers.get(entry.prefill.incarnation)
        if worker is not None:
            self.sides[Side.PREFILL].forget_sent(
                worker, worker.sent_prefixes.abandon(entry.uncomputed_blocks)
            )
        entry.uncomputed_blocks = ()

    def side_retired(self, room: RoomId, side: Side) -> None:
        """Record that the worker of one side gave back all memory of a room. Unknown rooms are ignored."""
        entry = self._open.get(room)
        if entry is None:
            return
        entry.waiting_for.discard(side)
        self._unload(entry, side)
        self._look_at_opener(entry)
        self._file_if_retired(entry)

    def mark_delivered(self, room: RoomId, sides: Iterable[Side]) -> None:
        """Record that the opener of a room (the process that asked for it) has sent it to the workers of
        these sides. Unknown rooms are ignored."""
        entry = self._open.get(room)
        if entry is None or not entry.undelivered:
            return
        for side in entry.undelivered.intersection(sides):
            entry.undelivered.discard(side)
            worker = self._workers.get(entry.worker(side).incarnation)
            if worker is not None:
                tokens = worker.queue.delivered(room)
                if worker.usage.unreported.delivered(room) or tokens:
                    self._loaded(worker)
        self._look_at_opener(entry)

    def sides_to_end(self, entry: RoomEntry) -> list[Side]:
        """Return the sides to whose workers the end of a room has to be sent: they hold a lease and have not
        reported the room retired."""
        sides = [side for side in Side if side in entry.waiting_for]
        return [side for side in sides if self.holds_lease(entry.worker(side).incarnation)]

    def ends_to_resend(self, facts: WorkerFacts) -> list[RoomEntry]:
        """Return the ended rooms of a worker that it has not reported retired. It may have missed their ends
        while it was silent, or may never have got the rooms."""
        rooms = self.open_rooms_of(facts.incarnation)
        return [each for each in rooms if facts.side in each.waiting_for and each.phase is RoomPhase.CLOSING]

    def abandon(self, room: RoomId) -> None:
        """Store an ended room although a worker never reported it retired. Unknown rooms are ignored."""
        entry = self._open.get(room)
        if entry is None:
            return
        for side in [each for each in Side if each in entry.waiting_for]:
            self.side_retired(room, side)

    def _enter_room(self, entry: RoomEntry, now_ms: int) -> None:
        self._open[entry.id] = entry
        self.phases[entry.phase] += 1
        for wait in (self._undelivered, self._without_outcome):
            wait.enter(entry.id, entry, now_ms)
        self.index.opened(entry)
        for facts in entry.workers:
            self._rooms_by_worker.setdefault(facts.incarnation, {})[entry.id] = entry

    def _reserve(self, worker: Worker, *, reserved: bool) -> None:
        worker.reserved = reserved
        self._loaded(worker)

    def _unload(self, entry: RoomEntry, side: Side) -> None:
        worker = self._workers.get(entry.worker(side).incarnation)
        if worker is not None and entry.id in worker.rooms:
            if side is Side.PREFILL:
                worker.sent_prefixes.mark_computed(
                    entry.uncomputed_blocks
                ) if entry.cause is None else worker.sent_prefixes.abandon(entry.uncomputed_blocks)
                entry.uncomputed_blocks = ()
            worker.rooms.discard(entry.id)
            worker.canaries.discard(entry.id)
            worker.usage.unreported.release(entry.id)
            worker.queue.release(entry.id)
            self._loaded(worker)

    def _depart(self, incarnation: Incarnation, proof: str) -> None:
        """Record that a worker's process is gone. It holds no memory, so no report of its rooms is awaited
        any more."""
        self._silent.pop(incarnation, None)
        remember(self._departed, incarnation, proof, DEPARTED_MAX)
        for entry in self.open_rooms_of(incarnation):
            for side in entry.sides:
                if entry.worker(side).incarnation == incarnation:
                    self.side_retired(entry.id, side)
