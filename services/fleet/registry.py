"""Which workers are there, which rooms are open on them, and what has each room been through?

The bootstrap's own state. Pure: time is an argument, randomness is injected, the caller performs calls.
Room ids come from here and from nowhere else (`room-issued`): a counter that starts at a random place, so
that no id is used twice (`room-unique`), none repeats after a restart but by a chance of 2^-30, and none
carries placement.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import islice, product, takewhile
from typing import Final, TypeVar

from baton.fleet.due_queue import DueQueue
from baton.fleet.pair_health import PairHealth
from baton.fleet.placement import Need, Pair, place, place_back, to_reserve, uncached_tokens
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
"""For how long a turn may not end, where a lease is shorter. An idle worker ends one each second."""
CLOSING_MS: Final = 60_000
"""How long an ended room waits for its workers to report it retired before it is filed without."""
OPEN_MS_MAX: Final = 4 * 3_600_000
"""How long a room may be open. Above every phase's deadline on the workers: it ends rooms whose opener
is gone (`room-ends`)."""
DELIVERY_MS: Final = 60_000
"""How long a room waits for its opener to bring it to both workers."""
OUTCOME_MS: Final = 10_000
"""How long a room that both workers gave back waits for its opener to say how it ended."""
EXPECTED_MS: Final = 30_000
"""How long a worker is expected to be ready after it registered, or after another of its side was lost: about
twice what one takes to start, to load and to prove itself."""
GOODBYE: Final = "left"
"""The proof of a worker that has said that it leaves."""
CANARIES_KEPT: Final = 64
"""Canaries' rooms are kept apart: a worker that never gets ready makes one a second."""


class Registry:
    """Workers by incarnation and rooms by id. Bounded: open rooms by the workers' own limits, kept ones
    by `kept` and `failed_kept`."""

    def __init__(
        self,
        model: str,
        first_room: int,
        lease_ms: int,
        kept: int,
        failed_kept: int,
        context_length: int = 0,
    ) -> None:
        """`model`, `context_length`: fingerprint, and most tokens of a sequence, that every worker must have.
        `first_room`: random, 1 <= it < 2^62."""
        self.model = model
        self.context_length = context_length
        self._next_room = first_room
        self.lease_ms = lease_ms
        self._listened_ms: int | None = None
        """When it was last asked who is `expired`."""
        self._kept = kept
        self._failed_kept = failed_kept
        self._workers: dict[Incarnation, Worker] = {}
        self._names: dict[str, Incarnation] = {}
        """Of those workers."""
        self._leases: OrderedDict[Incarnation, Worker] = OrderedDict()
        """The same, the one whose lease ends first before the others."""
        self._on = {side: SideWorkers() for side in Side}
        self._open: dict[RoomId, RoomEntry] = {}
        self._done: OrderedDict[RoomId, RoomEntry] = OrderedDict()
        self._failed: OrderedDict[RoomId, RoomEntry] = OrderedDict()
        self._canaries: OrderedDict[RoomId, RoomEntry] = OrderedDict()
        self._tables = (self._open, self._done, self._failed, self._canaries)
        self.phases: Counter[RoomPhase] = Counter()
        """Of open rooms: how many are in each."""
        self._of_worker: dict[Incarnation, dict[RoomId, RoomEntry]] = {}
        """Open rooms by each of their workers, be it gone."""
        self._untaken: DueQueue[RoomId, RoomEntry] = DueQueue(DELIVERY_MS)
        """Open rooms that wait for their opener."""
        self._unended: DueQueue[RoomId, RoomEntry] = DueQueue(OPEN_MS_MAX)
        """Open rooms without an outcome."""
        self._given_back: dict[RoomId, RoomEntry] = {}
        """Those of them that no worker holds any more, since the last look at the time."""
        self._untold: DueQueue[RoomId, RoomEntry] = DueQueue(OUTCOME_MS)
        """The same, since before."""
        self._closing: DueQueue[RoomId, RoomEntry] = DueQueue(CLOSING_MS)
        """Open rooms with an outcome."""
        self.pairs = PairHealth()
        """Which of the workers' pairs do not reach each other."""
        self.index = RoomIndex()
        """Of all these rooms, for whoever looks at them."""
        self._silent: OrderedDict[Incarnation, WorkerFacts] = OrderedDict()
        """Workers whose lease ran out and of whom nothing more is known."""
        self._departed: OrderedDict[Incarnation, str] = OrderedDict()
        self._reserved: list[Worker] = []
        """Each for one request."""
        self._expected_until_ms = dict.fromkeys(Side, 0)
        """Of each side, since a worker of it was lost."""

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
        """Of a worker that holds its lease or fell silent; None for any other."""
        worker = self._workers.get(incarnation)
        return self._silent.get(incarnation) if worker is None else worker.facts

    def side_of(self, incarnation: Incarnation) -> Side | None:
        """The same of its side."""
        facts = self.facts_of(incarnation)
        return None if facts is None else facts.side

    def silent(self, name: str) -> list[Incarnation]:
        """Those of the name whose lease ran out. The name's next holder does not prove that they are gone."""
        return [each for each, facts in self._silent.items() if facts.name == name]

    def register(self, facts: WorkerFacts, now_ms: int, turn_ms: int = 0) -> None:
        """Enter a worker. Raises WorkerRefused naming the field that differs from the stack's,
        NameInUse while another incarnation of the name holds its lease, DeclaredGone, and TurnStalled where
        its turn has not ended for too long."""
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
        """Raises UnknownWorker, DeclaredGone, and TurnStalled where its turn has not ended for a lease:
        `leave` it, since its rooms do not go on."""
        worker = self.worker(incarnation)
        self._check_turns(turn_ms)
        self._lend(worker, now_ms)
        if worker.state is WorkerState.SUSPECT:
            worker.state = WorkerState.READY if worker.proven else WorkerState.JOINING
            self._changed(worker)

    def update_load(self, incarnation: Incarnation, load: WorkerLoad, now_ms: int) -> bool:
        """What a worker says of its load. Whether there is more space on it than was thought: somebody who
        waits may fit. A decode worker's of other groups than it registered says nothing."""
        worker = self._workers.get(incarnation)
        if worker is None:
            return False
        # A higher one than any that was issued is of a bootstrap that was here before.
        entered = load.entered if load.entered < self._next_room else RoomId(0)
        side, more = worker.facts.side, False

        def is_brought(room: RoomId) -> bool:
            return side not in self._open[room].untaken

        if side is Side.PREFILL:
            worker.queue.hear(load, entered, is_brought, now_ms)
        elif worker.usage.fits(load):
            more = worker.usage.hear(load, entered, is_brought)
        self._loaded(worker)
        return more

    def proven(self, incarnation: Incarnation) -> WorkerFacts | None:
        """A canary hand-over passed through this worker. Whom that made ready: nobody, where it was ready, or
        has left since."""
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
        """A call to it broke. What ended one side of a process may have ended the other."""
        worker = self._workers.get(incarnation)
        for each in (worker, None if worker is None else worker.twin):
            if each is not None and each.state is not WorkerState.DRAINING:
                each.state = WorkerState.SUSPECT
                self._changed(each)

    def drain(self, incarnation: Incarnation, paused: int = 0) -> int:
        """It gets no new rooms. Returns how many it is to wait for: its open ones, and `paused` requests
        whose rooms it retracted, which may have to go on there. Once there are none, none comes."""
        worker = self.worker(incarnation)
        worker.state = WorkerState.DRAINING
        awaited = len(worker.rooms) + paused
        worker.dismissed = not awaited
        self._changed(worker)
        return awaited

    def weigh(self, process: str, prefill: int) -> list[Worker]:
        """From the next room on, a process that serves both sides is meant to have so many of 100 parts of
        its time for prefill. What it has begun it ends as it is (`weight-is-no-state`). Returns its
        sides. Raises UnknownWorker for one that is not there, or that serves one side alone."""
        others = ((worker, worker.facts.other_side) for worker in self._workers.values())
        sides = [worker for worker, other in others if other is not None and other.process == process]
        if not sides:
            raise UnknownWorker(f"no process called {process!r} serves both sides here")
        for worker in sides:
            worker.weigh(prefill)
            self._loaded(worker)
        return sides

    def joining(self) -> list[Worker]:
        """Those that no canary has passed through yet."""
        return [worker for side in self._on.values() for worker in side.joining.values()]

    def expects(self, side: Side, now_ms: int) -> bool:
        """Where no worker of a side is ready: one is known to be starting, or broke or was lost a moment ago:
        it is likely to be started again. Who has said goodbye is not expected back."""
        joining = reversed(self._on[side].joining.values())
        joined = any(now_ms < worker.joined_ms + EXPECTED_MS for worker in joining)
        return joined or now_ms < self._expected_until_ms[side]

    def expect_back(self, incarnation: Incarnation, now_ms: int) -> None:
        """It is about to end, since something of it broke. Raises UnknownWorker."""
        self._expect(self.worker(incarnation), now_ms)

    def leave(self, incarnation: Incarnation, proof: str | None, now_ms: int) -> list[RoomEntry]:
        """Remove a worker. `proof`: how its process is known to be gone, or None for a mere silence, which
        ends its rooms but proves nothing. Returns its open rooms: the caller ends them. Local ones
        go on without their prefill worker. A process that is gone holds nothing, so no report of its rooms is
        waited for."""
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
        """Incarnations of worker `name` that registered process id `pid`, silent ones included. A late report
        says nothing about the name's next holder (`incarnation`)."""
        holder = self._names.get(name)
        held = {} if holder is None else {holder: self._workers[holder].facts}
        known = self._silent | held
        return [each for each, facts in known.items() if pid and (facts.name, facts.pid) == (name, pid)]

    def exited(self, name: str, pid: int, digest: bytes) -> list[Incarnation]:
        """Those of them whose starter reports the exit: `leave` them with that proof (`exit-by-starter`).

        `digest`: SHA-256 of the secret that the reporter shows. Only the starter of a process has its secret.
        """
        facts = ((each, self.facts_of(each)) for each in self.of_process(name, pid))
        return [each for each, known in facts if known and known.exit_digest and known.exit_digest == digest]

    def expired(self, now_ms: int, heard_ms: int | None = None) -> list[Incarnation]:
        """Workers whose lease has run out: `leave` them. A lease ends by silence while somebody listened.

        `heard_ms`: what was said before then was taken note of (not given: before now); what was said since
        may wait in a queue of the listener's own (`live-is-not-lost`). To be asked often: of the time since
        the last call at most a third of a lease, in which it would have been renewed once, is counted. What a
        paused machine did not hear is forgiven."""
        since_ms = now_ms if self._listened_ms is None else self._listened_ms
        unheard_ms = now_ms - since_ms - self.lease_ms // 3
        if unheard_ms > 0:
            for worker in self._workers.values():
                worker.lease_until_ms = min(worker.lease_until_ms + unheard_ms, now_ms + self.lease_ms)
        self._listened_ms = now_ms
        until_ms = now_ms if heard_ms is None else min(heard_ms, now_ms)
        first = takewhile(lambda worker: worker.lease_until_ms <= until_ms, self._leases.values())
        late = {worker.facts.incarnation for worker in first}
        return [each for each in self._workers if each in late] if late else []

    def departed(self) -> list[Incarnation]:
        """Processes that are known to be gone, latest last, at most DEPARTED_MAX."""
        return list(self._departed)

    # ---- rooms

    def place(self, need: Need, avoid: Collection[Incarnation] = (), back: Incarnation | None = None) -> Pair:
        """The best pair, or decode worker alone (`baton.fleet.placement`). `back`: the decode worker that
        retracted the request's room. Where no other has space, it gets the request even while it drains.
        Raises NoSuchWorker, and NoCapacity where waiting for either helps."""
        try:
            return place(self._on, need, avoid, self.pairs)
        except (NoCapacity, NoSuchWorker) as lacks:
            worker = None if back is None else self._workers.get(back)
            if worker is None or not worker.takes_back:
                raise
            try:
                return place_back(self._on, need, worker, avoid, self.pairs)
            except NoSuchWorker:
                raise lacks from None
            except NoCapacity as full:
                raise (lacks if isinstance(lacks, NoCapacity) else full) from None

    def computed(self, incarnation: Incarnation, blocks: Sequence[Block]) -> None:
        """A worker has computed what a request is to go on behind, so it may hold that still."""
        worker = self._workers.get(incarnation)
        if worker is not None:
            self._on[worker.facts.side].sent(worker, blocks)

    def reserve(
        self, need: Need, avoid: Collection[Incarnation] = (), before: Incarnation | None = None
    ) -> Incarnation | None:
        """Place nothing on one decode worker, which is left to a request that does not fit now, until
        `reserve_none`. `before`: the one that was reserved for it last. None: there is none to reserve."""
        was = None if before is None else self._workers.get(before)
        worker = to_reserve(self._on, need, avoid, self.pairs, was)
        if worker is None:
            return None
        self._reserved.append(worker)
        self._reserve(worker, reserved=True)
        return worker.facts.incarnation

    def reserve_none(self) -> None:
        while self._reserved:
            self._reserve(self._reserved.pop(), reserved=False)

    def unreachable(self) -> list[tuple[Worker, Worker]]:
        """The pairs of ready workers, if none of them reaches its other, and no decode worker of them serves
        alone."""
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
        """Sides without a ready worker, for want of which nobody gets a room."""
        empty = [side for side in Side if not self.ready_count(side)]
        return [] if empty == [Side.PREFILL] and self.serves_alone else empty

    def ready_count(self, side: Side) -> int:
        return len(self._on[side].ready)

    @property
    def serves_alone(self) -> bool:
        """A decode worker that computes prompts is ready."""
        return self.alone_count > 0

    @property
    def alone_count(self) -> int:
        """Ready decode workers that compute prompts."""
        return sum(worker.facts.computes for worker in self._on[Side.DECODE].ready)

    @property
    def asks_what_was_sent(self) -> bool:
        """Which workers were sent a prompt's beginning matters: some side has more than one, or decode is
        told when prefill will have computed it."""
        computes = any(worker.facts.computes for worker in islice(self._on[Side.DECODE].known, 1))
        return computes or any(len(side.known) > 1 for side in self._on.values())

    @property
    def all_full(self) -> bool:
        """Every request of a client would have to wait, however little it asks for: decode has no space, or
        prefill has none, and no decode worker with some may be asked alone. A worker that drains may take
        one back even so."""
        prefill, decode = (self._on[side] for side in (Side.PREFILL, Side.DECODE))
        if prefill.has_space and decode.has_space:
            return False
        largest = prefill.ready.tokens_max
        apart = self.pairs.broken_count() > 0
        alone = (each.facts for each in decode.with_space() if each.facts.computes)
        return not any(apart or facts.tokens_max > largest for facts in alone)

    def taking_back(self) -> list[Incarnation]:
        """Decode workers that drain, and have some space for whose room they retracted."""
        return [
            incarnation
            for incarnation, worker in self._on[Side.DECODE].draining.items()
            if worker.takes_back and worker.places_left > 0 and worker.usage.begins(1)
        ]

    def outlook(self, now_ms: int) -> Hashable:
        """Whether there is a worker for a request, and not only none with space, is the same for as long as
        this is equal."""
        return tuple((workers.changes, self.expects(side, now_ms)) for side, workers in self._on.items())

    @property
    def changes(self) -> int:
        """How often a worker came or left, or changed its state: what they can hold depends on that alone."""
        return sum(workers.changes for workers in self._on.values())

    def tokens_max(self, side: Side) -> int:
        """KV positions that a request may ever take on a side, of the workers that are there; 0 without
        any."""
        return self._on[side].tokens_max

    @property
    def tokens_max_alone(self) -> int:
        """The same of decode workers that compute prompts, whatever is left for prefill's part."""
        return self._on[Side.DECODE].computing.tokens_max

    @property
    def decode_page_tokens(self) -> int:
        """Of a page of decode's, the largest where they differ; 1 without workers."""
        return max(self._on[Side.DECODE].page_sizes, default=1)

    @property
    def quantize(self) -> str | None:
        """As what all workers hold the model's weights; None without workers."""
        return next((worker.facts.stack.quantize for worker in self._leases.values()), None)

    def tokens_max_now(self, side: Side) -> int:
        """The same of those that get rooms now or may again at once, if there are any."""
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
        """Of a `pair` without a prefill worker decode computes the prompt."""
        room = self._fresh_id()
        prefill, decode = pair
        entry = RoomEntry(
            room,
            request_id,
            None if prefill is None else prefill.facts,
            decode.facts,
            need.prompt_tokens if prefill is None else uncached_tokens(prefill, need),
            need.first_on(decode.facts),
            now_ms,
            canary,
            retry_of,
            trace_id,
            choices=need.choices,
            is_back=is_back,
            is_kept=prefill is None and decode.twin is not None and decode.twin.is_serving,
        )
        self._open[room] = entry
        self.phases[entry.phase] += 1
        for wait in (self._untaken, self._unended):
            wait.enter(room, entry, now_ms)
        self.index.opened(entry)
        if prefill is not None:
            cost = prefill.queue.cost(entry.prompt_tokens, need.scores)
            prefill.queue.place(room, cost, now_ms)
            # A canary is to prove a hand-over: decode does not compute what it knows no time of.
            entry.prefill_ms = None if canary else prefill.queue.left_ms(now_ms)
            entry.prefill_own_ms = prefill.queue.takes_ms(cost)
        for worker in (decode,) if prefill is None else (prefill, decode):
            worker.rooms.add(room)
            if canary:
                worker.canaries.add(room)
            worker.usage.since.place(room, entry.tokens_on(worker.facts.side))
            self._of_worker.setdefault(worker.facts.incarnation, {})[room] = entry
            self._loaded(worker)
            new = self._on[worker.facts.side].sent(worker, need.blocks)
            if worker is prefill:
                entry.sent = worker.sent.expect(need.blocks, new)
        return entry

    def get(self, room: RoomId) -> RoomEntry:
        for table in self._tables:
            if room in table:
                return table[room]
        raise UnknownRoom(f"room {room} is not known here")

    def find(self, request_id: str) -> list[RoomEntry]:
        """Rooms of one request id, exactly, newest first: those of its retries, and a client may reuse it."""
        return list(self.index.named(request_id))

    def rooms(self) -> Iterator[RoomEntry]:
        """Newest first: the open ones, then the kept ones."""
        for table in self._tables:
            yield from reversed(table.values())

    def open_rooms(self) -> list[RoomEntry]:
        """Newest first."""
        return list(reversed(self._open.values()))

    def known_count(self) -> int:
        return sum(len(table) for table in self._tables)

    def open_count(self) -> int:
        return len(self._open)

    def open_rooms_of(self, incarnation: Incarnation) -> list[RoomEntry]:
        """Of one worker, be it gone, oldest first."""
        return list(self._of_worker.get(incarnation, {}).values())

    def has_open_rooms(self, incarnation: Incarnation) -> bool:
        return incarnation in self._of_worker

    def record(self, room: RoomId, event: Event) -> bool:
        """Add a line to a room's timeline; a room that is not known gets none."""
        try:
            entry = self.get(room)
        except UnknownRoom:
            return False
        entry.record(event)
        return True

    def streaming(self, room: RoomId) -> None:
        entry = self._open.get(room)
        if entry is not None and entry.phase is RoomPhase.OPEN:
            self._enter(entry, RoomPhase.STREAMING)

    def local(self, room: RoomId) -> None:
        """Its decode worker computes the prompt itself, so that its prefill worker does not hold it."""
        entry = self._open.get(room)
        if entry is None or entry.prefill is None or entry.is_local:
            return
        entry.is_local = True
        worker = self._workers.get(entry.prefill.incarnation)
        if worker is not None:
            self._on[Side.PREFILL].not_kept(worker, worker.sent.given_up(entry.sent))
        entry.sent = ()

    def end(self, room: RoomId, cause: Cause | None, now_ms: int) -> bool:
        """The room's outcome: None for an answered request. The first one is kept. False if it had one."""
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
        """One worker gave back everything it held for the room. Unknown rooms are ignored."""
        entry = self._open.get(room)
        if entry is None:
            return
        entry.waiting_for.discard(side)
        self._unload(entry, side)
        self._look_at_opener(entry)
        self._file_if_retired(entry)

    def taken(self, room: RoomId, sides: Iterable[Side]) -> None:
        """Its opener brought it to these sides. Unknown rooms are ignored."""
        entry = self._open.get(room)
        if entry is None or not entry.untaken:
            return
        for side in entry.untaken.intersection(sides):
            entry.untaken.discard(side)
            worker = self._workers.get(entry.worker(side).incarnation)
            if worker is not None:
                tokens = worker.queue.brought(room)
                if worker.usage.since.brought(room) or tokens:
                    self._loaded(worker)
        self._look_at_opener(entry)

    def unended(self, now_ms: int) -> list[RoomEntry]:
        """Rooms whose opener is gone: not brought to both workers in DELIVERY_MS, open for OPEN_MS_MAX, or
        given back by both workers OUTCOME_MS ago. `end` them, and cancel them on their workers."""
        for entry in self._given_back.values():
            self._untold.enter(entry.id, entry, now_ms)
        self._given_back.clear()
        waits = (self._untaken, self._unended, self._untold)
        late = {entry.id: entry for wait in waits for entry in wait.due(now_ms)}
        return [late[room] for room in sorted(late)]

    def overdue(self, now_ms: int) -> list[RoomEntry]:
        """Ended rooms whose workers did not report in time: `abandon` them."""
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
        """Whoever holds a lease fits all others that do."""
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
        """It, or what is started in its place, if it ever served."""
        if worker.proven:
            self._expected_until_ms[worker.facts.side] = now_ms + EXPECTED_MS

    def _lend(self, worker: Worker, now_ms: int) -> None:
        """A lease from now on."""
        worker.lease_until_ms = now_ms + self.lease_ms
        self._leases[worker.facts.incarnation] = worker
        self._leases.move_to_end(worker.facts.incarnation)

    def _changed(self, worker: Worker) -> None:
        """Its state."""
        self._on[worker.facts.side].changed(worker)

    def _loaded(self, worker: Worker) -> None:
        """Its rooms, its weight, or what is used of it: the other side of its process stands behind that,
        too."""
        self._on[worker.facts.side].loaded(worker)
        if worker.twin is not None:
            self._on[worker.twin.facts.side].loaded(worker.twin)

    def _join(self, worker: Worker) -> None:
        """The other side of its process, if that is there, and each names the other. What that side was told
        of their weights since it came is of both."""
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
                worker.sent.computed(entry.sent) if entry.cause is None else worker.sent.given_up(entry.sent)
                entry.sent = ()
            worker.rooms.discard(entry.id)
            worker.canaries.discard(entry.id)
            worker.usage.since.gone(entry.id)
            worker.queue.gone(entry.id)
            self._loaded(worker)

    def _enter(self, entry: RoomEntry, phase: RoomPhase) -> None:
        self.phases[entry.phase] -= 1
        entry.phase = phase
        if phase is not RoomPhase.RETIRED:
            self.phases[phase] += 1

    def _look_at_opener(self, entry: RoomEntry) -> None:
        """What its opener is waited for with, once a side took it or gave it back."""
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
            table, limit = self._canaries, CANARIES_KEPT
        elif entry.has_failed:
            table, limit = self._failed, self._failed_kept
        else:
            table, limit = self._done, self._kept
        for forgotten in _remember(table, entry.id, entry, limit):
            self.index.forgotten(forgotten)

    def _depart(self, incarnation: Incarnation, proof: str) -> None:
        """A process that is gone holds nothing: no report of its rooms is waited for any more."""
        self._silent.pop(incarnation, None)
        _remember(self._departed, incarnation, proof, DEPARTED_MAX)
        for entry in self.open_rooms_of(incarnation):
            for side in entry.sides:
                if entry.worker(side).incarnation == incarnation:
                    self.side_retired(entry.id, side)


K = TypeVar("K")
V = TypeVar("V")


def _remember(table: OrderedDict[K, V], key: K, value: V, limit: int) -> list[V]:
    """Enter into a bounded table. Returns what made room: the oldest."""
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
