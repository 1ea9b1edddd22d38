"""Registered workers and the rooms on them: the router's own state.

It is pure: time is an argument, randomness is injected, and the caller performs calls. Room ids come from
here and from nowhere else (`room-issued`). They are a counter with a random start. So no id is used twice
(`room-unique`), and one repeats after a restart with a chance of 2^-30. An id says nothing of where its room
is.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import islice, product, takewhile
from typing import Final, TypeVar

from baton.fleet.due_queue import DueQueue
from baton.fleet.pair_health import PairHealth
from baton.fleet.placement import Need, Pair, choose_reserved, place, place_retracted, uncached_tokens
from baton.fleet.prefix_affinity import Block
from baton.fleet.room_entry import RoomEntry, RoomPhase
from baton.fleet.room_index import RoomIndex
from baton.fleet.side_workers import SideWorkers
from baton.fleet.worker_record import Worker, WorkerState
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import (
    Cause,
    DeclaredGone,
    NameInUse,
    NoCapacity,
    NoSuchWorker,
    TurnStalled,
    UnknownRoom,
    UnknownWorker,
    WorkerRefused,
)
from baton.rooms.phases import Side
from baton.rooms.timeline import Event
from baton.rooms.worker_facts import WEIGHT_TOTAL, StackFacts, WorkerFacts
from baton.rooms.worker_load import WorkerLoad

DEPARTED_MAX: Final = 1024
TURN_MS_MAX: Final = 3_000
"""Longest time without the end of a turn, if a lease is shorter. An idle worker ends a turn each second."""
CLOSING_MS: Final = 60_000
"""Time for the workers of an ended room to report it retired, before it is filed without."""
OPEN_MS_MAX: Final = 4 * 3_600_000
"""Longest time that a room may be open. It exceeds every deadline of a phase on the workers, and ends rooms
whose opener is gone (`room-ends`)."""
DELIVERY_MS: Final = 60_000
"""Time for the opener of a room to deliver it to both workers."""
OUTCOME_MS: Final = 10_000
"""Time for the opener of a room to report its outcome, once both workers have given it back."""
EXPECTED_MS: Final = 30_000
"""Time in which a worker is expected to become ready, after it registered or another one of its side was
lost. It is about twice what a worker takes to start, to load and to prove itself."""
GOODBYE: Final = "left"
"""Proof of departure of a worker that has said goodbye."""
CANARY_ROOMS_FILED_MAX: Final = 64
"""Canary rooms that are kept after their end. They are kept apart, since a worker that never gets ready makes
one a second."""


class Registry:
    """Workers by incarnation and rooms by id. Bounded: open rooms by the workers' own limits, filed ones by
    `kept` and `failed_kept`."""

    def __init__(
        self,
        model: str,
        first_room: int,
        lease_ms: int,
        kept: int,
        failed_kept: int,
        context_length: int = 0,
    ) -> None:
        """`model`, `context_length`: fingerprint and context length that every worker must have.

        `first_room`: first room id, random, at least 1 and below 2^62. `kept`, `failed_kept`: ended rooms
        that are kept, answered and failed ones.
        """
        self.model = model
        self.context_length = context_length
        self._next_room = first_room
        self.lease_ms = lease_ms
        self._listened_ms: int | None = None
        """Time of the last call of `expired`."""
        self._kept = kept
        self._failed_kept = failed_kept
        self._workers: dict[Incarnation, Worker] = {}
        self._names: dict[str, Incarnation] = {}
        """Incarnations of these workers by name."""
        self._leases: OrderedDict[Incarnation, Worker] = OrderedDict()
        """The same workers, in the order in which their leases end."""
        self._on = {side: SideWorkers() for side in Side}
        self._open: dict[RoomId, RoomEntry] = {}
        self._done: OrderedDict[RoomId, RoomEntry] = OrderedDict()
        self._failed: OrderedDict[RoomId, RoomEntry] = OrderedDict()
        self._canaries: OrderedDict[RoomId, RoomEntry] = OrderedDict()
        self._tables = (self._open, self._done, self._failed, self._canaries)
        self.phases: Counter[RoomPhase] = Counter()
        """Number of open rooms by phase."""
        self._of_worker: dict[Incarnation, dict[RoomId, RoomEntry]] = {}
        """Open rooms by incarnation of their workers, also of workers that are gone."""
        self._untaken: DueQueue[RoomId, RoomEntry] = DueQueue(DELIVERY_MS)
        """Open rooms that wait for their opener to deliver them."""
        self._unended: DueQueue[RoomId, RoomEntry] = DueQueue(OPEN_MS_MAX)
        """Open rooms without an outcome."""
        self._given_back: dict[RoomId, RoomEntry] = {}
        """Rooms without an outcome that no worker holds any more, since the last call of `orphans`."""
        self._untold: DueQueue[RoomId, RoomEntry] = DueQueue(OUTCOME_MS)
        """Rooms without an outcome that no worker holds any more, since earlier."""
        self._closing: DueQueue[RoomId, RoomEntry] = DueQueue(CLOSING_MS)
        """Open rooms with an outcome."""
        self.pairs = PairHealth()
        """Pairs of workers that do not reach each other."""
        self.index = RoomIndex()
        """Index of all these rooms, for lookups."""
        self._silent: OrderedDict[Incarnation, WorkerFacts] = OrderedDict()
        """Workers whose lease ran out, and of which nothing more is known."""
        self._departed: OrderedDict[Incarnation, str] = OrderedDict()
        self._reserved: list[Worker] = []
        """Decode workers that are each reserved for one request."""
        self._expected_until_ms = dict.fromkeys(Side, 0)
        """Time until which a new worker of a side is expected, since one was lost."""

    # ---- workers

    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def worker(self, incarnation: Incarnation) -> Worker:
        if incarnation in self._workers:
            return self._workers[incarnation]
        self._check_lives(incarnation)
        raise UnknownWorker(f"incarnation {incarnation} holds no lease")

    def holds_lease(self, incarnation: Incarnation) -> bool:
        return incarnation in self._workers

    def facts_of(self, incarnation: Incarnation) -> WorkerFacts | None:
        """Return the facts of a worker that holds its lease or fell silent, or None."""
        worker = self._workers.get(incarnation)
        return self._silent.get(incarnation) if worker is None else worker.facts

    def side_of(self, incarnation: Incarnation) -> Side | None:
        """Return the side of a worker that holds its lease or fell silent, or None."""
        facts = self.facts_of(incarnation)
        return None if facts is None else facts.side

    def silent(self, name: str) -> list[Incarnation]:
        """Return the incarnations of that name whose lease ran out. The next holder of the name does not
        prove that they are gone."""
        return [each for each, facts in self._silent.items() if facts.name == name]

    def register(self, facts: WorkerFacts, now_ms: int, turn_ms: int = 0) -> None:
        """Register a worker, or renew its lease.

        Raises WorkerRefused with the field that differs from the stack's, NameInUse while another incarnation
        of the name holds its lease, DeclaredGone, and TurnStalled if its turn has not ended for too long.
        """
        if facts.model != self.model:
            raise WorkerRefused("model", self.model, facts.model)
        if facts.context_length != self.context_length:
            raise WorkerRefused("context_length", str(self.context_length), str(facts.context_length))
        self._check_lives(facts.incarnation)
        self._check_turns(turn_ms)
        known = self._workers.get(facts.incarnation)
        if known is None:
            self._check_fits(facts, now_ms)
            known = self._workers[facts.incarnation] = Worker(facts, 0, joined_ms=now_ms)
            self._names[facts.name] = facts.incarnation
            self._on[facts.side].enter(known)
            self._join(known)
            self._silent.pop(facts.incarnation, None)
        self._lend(known, now_ms)

    def renew(self, incarnation: Incarnation, now_ms: int, turn_ms: int = 0) -> None:
        """Renew a lease. Raises UnknownWorker, DeclaredGone, and TurnStalled if the worker's turn has not
        ended for a lease. Then the caller has to `leave` it, since its rooms do not go on."""
        worker = self.worker(incarnation)
        self._check_turns(turn_ms)
        self._lend(worker, now_ms)
        if worker.state is WorkerState.SUSPECT:
            worker.state = WorkerState.READY if worker.proven else WorkerState.JOINING
            self._changed(worker)

    def update_load(self, incarnation: Incarnation, load: WorkerLoad, now_ms: int) -> bool:
        """Take a worker's report of its load. Return whether it has more space than was assumed, so that a
        waiting request may fit. A decode worker's report with the wrong number of KV groups is ignored."""
        worker = self._workers.get(incarnation)
        if worker is None:
            return False
        # A higher one than any that was issued is of a bootstrap that was here before.
        entered = load.entered if load.entered < self._next_room else RoomId(0)
        side, more = worker.facts.side, False

        def is_brought(room: RoomId) -> bool:
            return side not in self._open[room].undelivered

        if side is Side.PREFILL:
            worker.queue.update(load, entered, is_brought, now_ms)
        elif worker.usage.fits(load):
            more = worker.usage.update(load, entered, is_brought)
        self._loaded(worker)
        return more

    def mark_proven(self, incarnation: Incarnation) -> WorkerFacts | None:
        """Note that a canary hand-over passed through this worker. Return its facts if that made it ready, or
        None if it was ready before or has left."""
        worker = self._workers.get(incarnation)
        if worker is None:
            return None
        worker.proven = True
        if worker.state is not WorkerState.JOINING:
            return None
        worker.state = WorkerState.READY
        self._changed(worker)
        return worker.facts

    def suspect(self, incarnation: Incarnation) -> None:
        """Give a worker no rooms, since a call to it broke. The other side of its process gets none
        either."""
        worker = self._workers.get(incarnation)
        for each in (worker, None if worker is None else worker.twin):
            if each is not None and each.state is not WorkerState.DRAINING:
                each.state = WorkerState.SUSPECT
                self._changed(each)

    def drain(self, incarnation: Incarnation, paused: int = 0) -> int:
        """Give a worker no new rooms. Return how many it has to wait for: open rooms, and `paused` requests
        whose rooms it retracted and which may have to go on there. Once the number is 0, none comes."""
        worker = self.worker(incarnation)
        worker.state = WorkerState.DRAINING
        awaited = len(worker.rooms) + paused
        worker.dismissed = not awaited
        self._changed(worker)
        return awaited

    def weigh(self, process: str, prefill: int) -> list[Worker]:
        """Set how much of its time a process that serves both sides spends on prefill, of 100, from the next
        room on. Rooms that have begun are not touched (`weight-is-no-state`).

        Return the workers of its two sides. Raises UnknownWorker for a process that is not there, or serves
        one side.
        """
        others = ((worker, worker.facts.other_side) for worker in self._workers.values())
        sides = [worker for worker, other in others if other is not None and other.process == process]
        if not sides:
            raise UnknownWorker(f"no process called {process!r} serves both sides here")
        for worker in sides:
            worker.weigh(prefill)
            self._loaded(worker)
        return sides

    def joining(self) -> list[Worker]:
        """Return workers that no canary has passed through yet."""
        return [worker for side in self._on.values() for worker in side.joining.values()]

    def expects(self, side: Side, now_ms: int) -> bool:
        """Return whether a worker of a side is likely to become ready soon: one is starting, or was lost a
        moment ago. A worker that said goodbye is not expected back."""
        joining = reversed(self._on[side].joining.values())
        joined = any(now_ms < worker.joined_ms + EXPECTED_MS for worker in joining)
        return joined or now_ms < self._expected_until_ms[side]

    def expect_back(self, incarnation: Incarnation, now_ms: int) -> None:
        """Note that a worker is about to end because something of it broke, and may be restarted. Raises
        UnknownWorker."""
        self._expect(self.worker(incarnation), now_ms)

    def leave(self, incarnation: Incarnation, proof: str | None, now_ms: int) -> list[RoomEntry]:
        """Remove a worker. Return its open rooms, which the caller has to end.

        Local rooms go on without their prefill worker. `proof`: how its process is known to be gone. None is
        mere silence, which ends its rooms but proves nothing. No report is awaited from a process that is
        gone, since it holds nothing.
        """
        worker = self._workers.pop(incarnation, None)
        self.pairs.forget(incarnation)
        if worker is not None and proof != GOODBYE:
            self._expect(worker, now_ms)
        if worker is not None:
            del self._leases[incarnation], self._names[worker.facts.name]
            self._on[worker.facts.side].remove(worker)
            self._part(worker)
        entries = [] if worker is None else [self._open[room] for room in sorted(worker.rooms)]
        if proof is not None:
            self._depart(incarnation, proof)
        elif worker is not None:
            _remember(self._silent, incarnation, worker.facts, DEPARTED_MAX)
        return [
            entry for entry in entries if entry.phase is not RoomPhase.RETIRED and entry.needs(incarnation)
        ]

    def of_process(self, name: str, pid: int) -> list[Incarnation]:
        """Return incarnations of worker `name` that registered process id `pid`, silent ones included. A late
        report says nothing about the next holder of the name (`incarnation`)."""
        holder = self._names.get(name)
        held = {} if holder is None else {holder: self._workers[holder].facts}
        known = self._silent | held
        return [each for each, facts in known.items() if pid and (facts.name, facts.pid) == (name, pid)]

    def exited(self, name: str, pid: int, digest: bytes) -> list[Incarnation]:
        """Return the incarnations whose exit their starter reports. The caller has to `leave` them with that
        proof (`exit-by-starter`).

        `digest`: SHA-256 of the secret that the reporter shows. Only the starter of a process has its secret.
        """
        facts = ((each, self.facts_of(each)) for each in self.of_process(name, pid))
        return [each for each, known in facts if known and known.exit_digest and known.exit_digest == digest]

    def expired(self, now_ms: int, accepted_until_ms: int | None = None) -> list[Incarnation]:
        """Return workers whose lease has run out. The caller has to `leave` them.

        Silence counts only while the router listens. `accepted_until_ms`: all messages sent before that time
        were read. Later ones may wait in a queue of the listener (`live-is-not-lost`). Not given: all sent
        before now were read.

        To be called often. Of the time since the last call, at most a third of a lease counts, in which a
        lease would have been renewed once. So leases survive a paused machine.
        """
        since_ms = now_ms if self._listened_ms is None else self._listened_ms
        unheard_ms = now_ms - since_ms - self.lease_ms // 3
        if unheard_ms > 0:
            for worker in self._workers.values():
                worker.lease_until_ms = min(worker.lease_until_ms + unheard_ms, now_ms + self.lease_ms)
        self._listened_ms = now_ms
        until_ms = now_ms if accepted_until_ms is None else min(accepted_until_ms, now_ms)
        first = takewhile(lambda worker: worker.lease_until_ms <= until_ms, self._leases.values())
        late = {worker.facts.incarnation for worker in first}
        return [each for each in self._workers if each in late] if late else []

    def departed(self) -> list[Incarnation]:
        """Return processes that are known to be gone, the latest last, at most DEPARTED_MAX."""
        return list(self._departed)

    # ---- rooms

    def place(self, need: Need, avoid: Collection[Incarnation] = (), back: Incarnation | None = None) -> Pair:
        """Return the best pair, or a decode worker alone (`baton.fleet.placement`).

        `back`: the decode worker that retracted the request's room. If no other worker has space, it gets the
        request even while it drains. Raises NoSuchWorker, and NoCapacity if waiting helps.
        """
        try:
            return place(self._on, need, avoid, self.pairs)
        except (NoCapacity, NoSuchWorker) as lacks:
            worker = None if back is None else self._workers.get(back)
            if worker is None or not worker.accepts_retracted:
                raise
            try:
                return place_retracted(self._on, need, worker, avoid, self.pairs)
            except NoSuchWorker:
                raise lacks from None
            except NoCapacity as full:
                raise (lacks if isinstance(lacks, NoCapacity) else full) from None

    def record_computed(self, incarnation: Incarnation, blocks: Sequence[Block]) -> None:
        """Note that a worker has computed the prefix of a request that goes on, and may hold it still."""
        worker = self._workers.get(incarnation)
        if worker is not None:
            self._on[worker.facts.side].record_sent(worker, blocks)

    def reserve(
        self, need: Need, avoid: Collection[Incarnation] = (), before: Incarnation | None = None
    ) -> Incarnation | None:
        """Reserve a decode worker for a request that does not fit now, until `release_reserved`. Nothing else
        is placed there. Return its incarnation, or None if there is none to reserve. `before`: the one that
        was reserved for it last."""
        was = None if before is None else self._workers.get(before)
        worker = choose_reserved(self._on, need, avoid, self.pairs, was)
        if worker is None:
            return None
        self._reserved.append(worker)
        self._reserve(worker, reserved=True)
        return worker.facts.incarnation

    def release_reserved(self) -> None:
        while self._reserved:
            self._reserve(self._reserved.pop(), reserved=False)

    def unreachable(self) -> list[tuple[Worker, Worker]]:
        """Return the pairs of ready workers if none of them connects and no decode worker serves alone. Empty
        otherwise."""
        prefill, decode = (self._on[side].ready for side in Side)
        if self.pairs.broken_count() < len(prefill) * len(decode):
            return []
        if self.serves_alone:
            return []
        ready = list(product(prefill, decode))
        broken = self.pairs.is_broken
        reached = any(not broken((one.facts.incarnation, other.facts.incarnation)) for one, other in ready)
        return [] if reached else ready

    def missing(self) -> list[Side]:
        """Return the sides without a ready worker, if requests cannot be served without."""
        empty = [side for side in Side if not self.ready_count(side)]
        return [] if empty == [Side.PREFILL] and self.serves_alone else empty

    def ready_count(self, side: Side) -> int:
        return len(self._on[side].ready)

    @property
    def serves_alone(self) -> bool:
        """Whether a decode worker that computes prompts is ready."""
        return self.alone_count > 0

    @property
    def alone_count(self) -> int:
        """Number of ready decode workers that compute prompts."""
        return sum(worker.facts.computes for worker in self._on[Side.DECODE].ready)

    @property
    def uses_prefix_affinity(self) -> bool:
        """Whether it matters which worker was sent a prompt's prefix: some side has several workers, or a
        decode worker may compute prompts."""
        computes = any(worker.facts.computes for worker in islice(self._on[Side.DECODE].known, 1))
        return computes or any(len(side.known) > 1 for side in self._on.values())

    @property
    def all_full(self) -> bool:
        """Whether every client's request would have to wait, however small it is.

        Decode has no space, or prefill has none and no decode worker with space may get a request alone. A
        draining worker may take back a retracted request even so.
        """
        prefill, decode = (self._on[side] for side in (Side.PREFILL, Side.DECODE))
        if prefill.has_space and decode.has_space:
            return False
        largest = prefill.ready.tokens_max
        apart = self.pairs.broken_count() > 0
        alone = (each.facts for each in decode.with_space() if each.facts.computes)
        return not any(apart or facts.tokens_max > largest for facts in alone)

    def accepting_retracted(self) -> list[Incarnation]:
        """Return decode workers that drain, and have some space for requests that they retracted."""
        return [
            incarnation
            for incarnation, worker in self._on[Side.DECODE].draining.items()
            if worker.accepts_retracted and worker.rooms_left > 0 and worker.usage.can_start(1)
        ]

    def outlook(self, now_ms: int) -> Hashable:
        """Return a value that changes whenever there may be workers for a request that had none, or none for
        one that had."""
        return tuple((workers.changes, self.expects(side, now_ms)) for side, workers in self._on.items())

    @property
    def changes(self) -> int:
        """Number of times that a worker came, left, or changed its state. What they can hold depends on that
        alone."""
        return sum(workers.changes for workers in self._on.values())

    def tokens_max(self, side: Side) -> int:
        """Return the most KV positions that a request may ever take on a side, of the workers that are there;
        0 without any."""
        return self._on[side].tokens_max

    @property
    def tokens_max_alone(self) -> int:
        """Most KV positions of a request on decode workers that compute prompts; 0 without any."""
        return self._on[Side.DECODE].computing.tokens_max

    @property
    def decode_page_tokens(self) -> int:
        """Tokens per page of decode workers, the largest if they differ; 1 without workers."""
        return max(self._on[Side.DECODE].page_sizes, default=1)

    @property
    def quantize(self) -> str | None:
        """Quantization of the model's weights on all workers; None without workers."""
        return next((worker.facts.stack.quantize for worker in self._leases.values()), None)

    def tokens_max_now(self, side: Side) -> int:
        """Return the most KV positions that a request may take on a side now, of workers that get rooms now
        or may again at once, if there are any."""
        return self._on[side].tokens_max_now

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
        """Open a room on a pair. Without a prefill worker, decode computes the prompt."""
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
        self._open[room] = entry
        self.phases[entry.phase] += 1
        for wait in (self._untaken, self._unended):
            wait.enter(room, entry, now_ms)
        self.index.opened(entry)
        if prefill is not None:
            cost = prefill.queue.cost(entry.prompt_tokens, need.scores)
            prefill.queue.add(room, cost, now_ms)
            # A canary is to prove a hand-over: decode does not compute what it knows no time of.
            entry.prefill_ms = None if canary else prefill.queue.left_ms(now_ms)
            entry.prefill_own_ms = prefill.queue.duration_ms(cost)
        for worker in (decode,) if prefill is None else (prefill, decode):
            worker.rooms.add(room)
            if canary:
                worker.canaries.add(room)
            worker.usage.unreported.add(room, entry.tokens_on(worker.facts.side))
            self._of_worker.setdefault(worker.facts.incarnation, {})[room] = entry
            self._loaded(worker)
            new = self._on[worker.facts.side].record_sent(worker, need.blocks)
            if worker is prefill:
                entry.uncomputed_blocks = worker.sent_prefixes.expect(need.blocks, new)
        return entry

    def get(self, room: RoomId) -> RoomEntry:
        for table in self._tables:
            if room in table:
                return table[room]
        raise UnknownRoom(f"room {room} is not known here")

    def find(self, request_id: str) -> list[RoomEntry]:
        """Return the rooms of exactly this request id, newest first. There are several if it was retried, or
        the client used the id again."""
        return list(self.index.named(request_id))

    def rooms(self) -> Iterator[RoomEntry]:
        """Yield all known rooms, newest first: the open ones, then the filed ones."""
        for table in self._tables:
            yield from reversed(table.values())

    def open_rooms(self) -> list[RoomEntry]:
        """Return open rooms, newest first."""
        return list(reversed(self._open.values()))

    def known_count(self) -> int:
        return sum(len(table) for table in self._tables)

    def open_count(self) -> int:
        return len(self._open)

    def open_rooms_of(self, incarnation: Incarnation) -> list[RoomEntry]:
        """Return open rooms of one worker, oldest first. The worker may be gone."""
        return list(self._of_worker.get(incarnation, {}).values())

    def has_open_rooms(self, incarnation: Incarnation) -> bool:
        return incarnation in self._of_worker

    def record(self, room: RoomId, event: Event) -> bool:
        """Add a line to a room's timeline. Return False if the room is unknown."""
        try:
            entry = self.get(room)
        except UnknownRoom:
            return False
        entry.record(event)
        return True

    def mark_streaming(self, room: RoomId) -> None:
        entry = self._open.get(room)
        if entry is not None and entry.phase is RoomPhase.OPEN:
            self._enter(entry, RoomPhase.STREAMING)

    def mark_local(self, room: RoomId) -> None:
        """Note that the decode worker of a room computes the prompt itself, so that its prefill worker does
        not hold it."""
        entry = self._open.get(room)
        if entry is None or entry.prefill is None or entry.is_local:
            return
        entry.is_local = True
        worker = self._workers.get(entry.prefill.incarnation)
        if worker is not None:
            self._on[Side.PREFILL].forget_sent(worker, worker.sent_prefixes.abandon(entry.uncomputed_blocks))
        entry.uncomputed_blocks = ()

    def end(self, room: RoomId, cause: Cause | None, now_ms: int) -> bool:
        """Record the outcome of a room: None for an answered request. The first outcome stays. Return False
        if it had one."""
        entry = self._open.get(room)
        if entry is None or entry.phase is RoomPhase.CLOSING:
            return False
        self._enter(entry, RoomPhase.CLOSING)
        for wait in (self._untaken, self._unended, self._untold):
            wait.leave(room)
        self._given_back.pop(room, None)
        self._closing.enter(room, entry, now_ms)
        entry.closing_ms = now_ms
        entry.cause = cause
        if entry.has_failed:
            self.index.failed(entry)
        self._file_if_retired(entry)
        return True

    def side_retired(self, room: RoomId, side: Side) -> None:
        """Note that one worker gave back everything it held for a room. Unknown rooms are ignored."""
        entry = self._open.get(room)
        if entry is None:
            return
        entry.waiting_for.discard(side)
        self._unload(entry, side)
        self._look_at_opener(entry)
        self._file_if_retired(entry)

    def mark_delivered(self, room: RoomId, sides: Iterable[Side]) -> None:
        """Note that the opener of a room delivered it to these sides. Unknown rooms are ignored."""
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

    def orphans(self, now_ms: int) -> list[RoomEntry]:
        """Return rooms whose opener is gone. The caller has to `end` them, and to cancel them on their
        workers.

        Such a room was not delivered to both workers in DELIVERY_MS, or is open for OPEN_MS_MAX, or was given
        back by both workers OUTCOME_MS ago.
        """
        for entry in self._given_back.values():
            self._untold.enter(entry.id, entry, now_ms)
        self._given_back.clear()
        waits = (self._untaken, self._unended, self._untold)
        late = {entry.id: entry for wait in waits for entry in wait.due(now_ms)}
        return [late[room] for room in sorted(late)]

    def overdue(self, now_ms: int) -> list[RoomEntry]:
        """Return ended rooms whose workers did not report in time. The caller has to `abandon` them."""
        return self._closing.due(now_ms)

    def abandon(self, room: RoomId) -> None:
        """File an ended room although a worker never reported it retired. Unknown rooms are ignored."""
        entry = self._open.get(room)
        if entry is None:
            return
        for side in [each for each in Side if each in entry.waiting_for]:
            self.side_retired(room, side)

    # ---- inside

    def _check_lives(self, incarnation: Incarnation) -> None:
        if incarnation in self._departed:
            raise DeclaredGone(f"incarnation {incarnation} was declared gone: restart the worker")

    def _check_turns(self, turn_ms: int) -> None:
        if turn_ms >= max(self.lease_ms, TURN_MS_MAX):
            raise TurnStalled(f"its turn has not ended for {turn_ms / 1000:.1f} s")

    def _check_fits(self, facts: WorkerFacts, now_ms: int) -> None:
        """Raise WorkerRefused or NameInUse unless a new worker fits all others that hold a lease."""
        holder = self._names.get(facts.name)
        if holder is not None:
            left_ms = max(self._workers[holder].lease_until_ms - now_ms, 0)
            raise NameInUse(f"{facts.name} is held by incarnation {holder} for {left_ms} ms")
        for worker in islice(self._leases.values(), 1):
            _check_stack(worker.facts.stack, facts.stack)
        for side in self._on.values():
            for page_tokens in side.page_sizes:
                _check_pages(page_tokens, facts.page_tokens)

    def _expect(self, worker: Worker, now_ms: int) -> None:
        """Expect a worker, or the one that is started in its place, if it ever served."""
        if worker.proven:
            self._expected_until_ms[worker.facts.side] = now_ms + EXPECTED_MS

    def _lend(self, worker: Worker, now_ms: int) -> None:
        """Give a worker a lease from now on."""
        worker.lease_until_ms = now_ms + self.lease_ms
        self._leases[worker.facts.incarnation] = worker
        self._leases.move_to_end(worker.facts.incarnation)

    def _changed(self, worker: Worker) -> None:
        """Note that the state of a worker changed."""
        self._on[worker.facts.side].changed(worker)

    def _loaded(self, worker: Worker) -> None:
        """Note that the load of a worker changed: its rooms, its weight, or its usage. The other side of its
        process shares that load."""
        self._on[worker.facts.side].loaded(worker)
        if worker.twin is not None:
            self._on[worker.twin.facts.side].loaded(worker.twin)

    def _join(self, worker: Worker) -> None:
        """Link a worker with the other side of its process, if that is there and each names the other. A
        weight that was set since the other side came is valid for both."""
        mine = worker.facts.other_side
        twin = None if mine is None else self._workers.get(mine.incarnation)
        theirs = None if twin is None else twin.facts.other_side
        if twin is None or theirs is None or twin.facts.side is worker.facts.side:
            return
        if theirs.incarnation == worker.facts.incarnation:
            worker.twin, twin.twin = twin, worker
            worker.weight = WEIGHT_TOTAL - twin.weight
            self._loaded(worker)

    def _part(self, worker: Worker) -> None:
        twin, worker.twin = worker.twin, None
        if twin is not None:
            twin.twin = None
            self._loaded(twin)

    def _reserve(self, worker: Worker, *, reserved: bool) -> None:
        worker.reserved = reserved
        self._loaded(worker)

    def _fresh_id(self) -> RoomId:
        room = RoomId(self._next_room)
        self._next_room += 1
        return room

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

    def _enter(self, entry: RoomEntry, phase: RoomPhase) -> None:
        self.phases[entry.phase] -= 1
        entry.phase = phase
        if phase is not RoomPhase.RETIRED:
            self.phases[phase] += 1

    def _look_at_opener(self, entry: RoomEntry) -> None:
        """Update what the opener of a room is awaited for, once a side got the room or gave it back."""
        if not entry.waits_for_opener:
            self._untaken.leave(entry.id)
        if not entry.waiting_for and entry.phase is not RoomPhase.CLOSING and entry.id not in self._untold:
            self._given_back[entry.id] = entry

    def _file_if_retired(self, entry: RoomEntry) -> None:
        if entry.phase is not RoomPhase.CLOSING or entry.waiting_for:
            return
        del self._open[entry.id]
        self._closing.leave(entry.id)
        for facts in entry.workers:
            rooms = self._of_worker[facts.incarnation]
            del rooms[entry.id]
            if not rooms:
                del self._of_worker[facts.incarnation]
        self._enter(entry, RoomPhase.RETIRED)
        if entry.canary:
            table, limit = self._canaries, CANARY_ROOMS_FILED_MAX
        elif entry.has_failed:
            table, limit = self._failed, self._failed_kept
        else:
            table, limit = self._done, self._kept
        for forgotten in _remember(table, entry.id, entry, limit):
            self.index.forgotten(forgotten)

    def _depart(self, incarnation: Incarnation, proof: str) -> None:
        """Declare a process gone. It holds nothing, so no report of its rooms is awaited any more."""
        self._silent.pop(incarnation, None)
        _remember(self._departed, incarnation, proof, DEPARTED_MAX)
        for entry in self.open_rooms_of(incarnation):
            for side in entry.sides:
                if entry.worker(side).incarnation == incarnation:
                    self.side_retired(entry.id, side)


K = TypeVar("K")
V = TypeVar("V")


def _remember(table: OrderedDict[K, V], key: K, value: V, limit: int) -> list[V]:
    """Enter a value into a bounded table. Return the oldest values, which made room."""
    table[key] = value
    return [table.popitem(last=False)[1] for _ in range(len(table) - limit)]


def _check_stack(known: StackFacts, new: StackFacts) -> None:
    got = new.in_words()
    for name, want in known.in_words().items():
        if want != got[name]:
            raise WorkerRefused(name, want, got[name])


def _check_pages(known: int, new: int) -> None:
    small, large = sorted((known, new))
    if large % small:
        raise WorkerRefused("page_tokens", str(known), f"{new}: neither is a multiple")
