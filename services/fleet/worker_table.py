"""Registered workers: their leases, their states, and what each side can serve.

It is pure: time is an argument.
"""

from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice, product, takewhile
from typing import Final

from baton.fleet.pair_health import PairHealth
from baton.fleet.side_workers import SideWorkers
from baton.fleet.stack_model import StackModel, check_pages, check_stack
from baton.fleet.worker_record import Worker, WorkerState
from baton.ids import Incarnation
from baton.rooms.errors import (
    DeclaredGone,
    NameInUse,
    TurnStalled,
    UnknownWorker,
)
from baton.rooms.phases import Side
from baton.rooms.worker_facts import WEIGHT_TOTAL, ServedEngine, WorkerFacts, served_engine

DEPARTED_MAX: Final = 1024
TURN_MS_MAX: Final = 3_000
"""Milliseconds without a turn after which a worker counts as stalled, unless leases last longer. An idle
worker ends a turn each second."""
EXPECTED_MS: Final = 30_000
"""Time in which a worker is expected to become ready after it registered, or after another of its side was
lost, in milliseconds. It is about twice the time to start, to load and to pass a canary."""


class WorkerTable:
    """Registered workers by incarnation: the base class of `Registry` that knows no rooms."""

    def __init__(self, model: StackModel, lease_ms: int) -> None:
        """Make an empty table. `model`: what all workers must serve."""
        self.model = model
        self.lease_ms = lease_ms
        self._listened_ms: int | None = None
        """Time of the last call of `expired`, in milliseconds."""
        self._workers: dict[Incarnation, Worker] = {}
        self._names: dict[str, Incarnation] = {}
        """Incarnation of the worker that holds each name now, by name."""
        self._leases: OrderedDict[Incarnation, Worker] = OrderedDict()
        """Registered workers, in the order in which their leases end."""
        self.sides = {side: SideWorkers() for side in Side}
        self.pairs = PairHealth()
        """Health of pairs of workers: which pairs do not reach each other."""
        self._silent: OrderedDict[Incarnation, WorkerFacts] = OrderedDict()
        """Facts of workers whose lease has run out but whose process may still run, by incarnation."""
        self._departed: OrderedDict[Incarnation, str] = OrderedDict()
        self._expected_until_ms = dict.fromkeys(Side, 0)
        """Time until which a replacement for a lost worker is expected, in milliseconds, by side."""

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
        """Return the facts of a worker that holds a lease or whose lease ran out, or None."""
        worker = self._workers.get(incarnation)
        return self._silent.get(incarnation) if worker is None else worker.facts

    def side_of(self, incarnation: Incarnation) -> Side | None:
        """Return the side of a worker that holds a lease or whose lease ran out, or None."""
        facts = self.facts_of(incarnation)
        return None if facts is None else facts.side

    def silent(self, name: str) -> list[Incarnation]:
        """Return the incarnations of this name whose lease ran out and whose process may still run. A new
        holder of the name does not prove that they are gone."""
        return [each for each, facts in self._silent.items() if facts.name == name]

    def register(self, facts: WorkerFacts, now_ms: int, turn_ms: int = 0) -> None:
        """Register a worker, or renew its lease. `turn_ms`: time since its last turn (iteration of its loop)
        ended.

        Raises WorkerRefused with the field that differs from the stack's, and NameInUse while another
        incarnation of the name holds its lease. Raises DeclaredGone, and TurnStalled if the last turn is too
        long ago.
        """
        self.model.check(facts)
        self._check_lives(facts.incarnation)
        self._check_turns(turn_ms)
        known = self._workers.get(facts.incarnation)
        if known is None:
            self._check_fits(facts, now_ms)
            known = self._workers[facts.incarnation] = Worker(facts, 0, joined_ms=now_ms)
            self._names[facts.name] = facts.incarnation
            self.sides[facts.side].enter(known)
            self._link_twin(known)
            self._silent.pop(facts.incarnation, None)
            self.model.accept(facts)
        self._renew_lease(known, now_ms)

    def renew(self, incarnation: Incarnation, now_ms: int, turn_ms: int = 0) -> None:
        """Renew a worker's lease. Raises UnknownWorker, DeclaredGone, and TurnStalled if its last turn is too
        long ago. Then the caller has to `leave` it, since its rooms make no progress."""
        worker = self.worker(incarnation)
        self._check_turns(turn_ms)
        self._renew_lease(worker, now_ms)
        if worker.is_full and not worker.reports:  # it never reports a load
            worker.is_full = False
            self._loaded(worker)
        if worker.state is WorkerState.SUSPECT:
            worker.state = WorkerState.READY if worker.proven else WorkerState.JOINING
            self._changed(worker)

    def mark_proven(self, incarnation: Incarnation) -> WorkerFacts | None:
        """Record that a canary (test request) passed through this worker. Return its facts if that made it
        ready, or None if it was ready before or has left."""
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
        """Give a worker no rooms, since a call to it broke. The worker of the other side in its process gets
        none either."""
        worker = self._workers.get(incarnation)
        for each in (worker, None if worker is None else worker.twin):
            if each is not None and each.state is not WorkerState.DRAINING:
                each.state = WorkerState.SUSPECT
                self._changed(each)

    def mark_full(self, incarnation: Incarnation) -> None:
        """Give a worker no rooms until its next report, since it refused one for want of a place."""
        worker = self._workers.get(incarnation)
        if worker is not None:
            worker.is_full = True
            self._loaded(worker)

    def weigh(self, process: str, prefill: int) -> list[Worker]:
        """Set the percentage of its time that a process serving both sides spends on prefill. It counts from
        the next room on, and changes no room that has begun (`weight-is-no-state`).

        Return the workers of its two sides. Raises UnknownWorker for an unknown process, or one that serves
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
        """Return the workers through which no canary (test request) has passed yet."""
        return [worker for side in self.sides.values() for worker in side.joining.values()]

    def expects(self, side: Side, now_ms: int) -> bool:
        """Return whether a worker of a side is likely to become ready soon: one has just registered, or was
        just lost and may be restarted. A worker that called Leave is not expected back."""
        joining = reversed(self.sides[side].joining.values())
        joined = any(now_ms < worker.joined_ms + EXPECTED_MS for worker in joining)
        return joined or now_ms < self._expected_until_ms[side]

    def expect_back(self, incarnation: Incarnation, now_ms: int) -> None:
        """Record that a worker is about to end because a part of it broke, and may be restarted. Raises
        UnknownWorker."""
        self._expect(self.worker(incarnation), now_ms)

    def of_process(self, name: str, pid: int) -> list[Incarnation]:
        """Return the incarnations that registered under this name with process id `pid`, silent ones
        included. A late report about them says nothing about the next holder of the name (`incarnation`)."""
        holder = self._names.get(name)
        holders = {} if holder is None else {holder: self._workers[holder].facts}
        known = self._silent | holders
        return [each for each, facts in known.items() if pid and (facts.name, facts.pid) == (name, pid)]

    def exited(self, name: str, pid: int, digest: bytes) -> list[Incarnation]:
        """Return the incarnations whose exit their starter reports. The caller has to `leave` them with that
        proof (`exit-by-starter`).

        `digest`: SHA-256 of the secret that the reporter shows. Only the starter of a process has its secret.
        """
        facts = ((each, self.facts_of(each)) for each in self.of_process(name, pid))
        return [each for each, known in facts if known and known.exit_digest and known.exit_digest == digest]

    def expired(self, now_ms: int, accepted_until_ms: int | None = None) -> list[Incarnation]:
        """Return the workers whose lease has run out. The caller has to `leave` them.

        A worker counts as silent only while the router reads its messages. `accepted_until_ms`: all messages
        sent before that time were read; None for now. Later ones may wait in the server's queue
        (`live-is-not-lost`).

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
        """Return the incarnations of processes known to have ended, the latest last, at most DEPARTED_MAX."""
        return list(self._departed)

    def unreachable(self) -> list[tuple[Worker, Worker]]:
        """Return all pairs of ready workers if none of the pairs connects, and no decode worker can serve
        alone. Empty otherwise."""
        prefill, decode = (self.sides[side].ready for side in Side)
        if self.pairs.broken_count() < len(prefill) * len(decode):
            return []
        if self.serves_alone:
            return []
        ready = list(product(prefill, decode))
        broken = self.pairs.is_broken
        reached = any(not broken((one.facts.incarnation, other.facts.incarnation)) for one, other in ready)
        return [] if reached else ready

    def missing(self) -> list[Side]:
        """Return the sides without a ready worker, if requests cannot be served without one."""
        empty = [side for side in Side if not self.ready_count(side)]
        return [] if empty == [Side.PREFILL] and self.serves_alone else empty

    def ready_count(self, side: Side) -> int:
        return len(self.sides[side].ready)

    @property
    def serves_alone(self) -> bool:
        """Whether a decode worker is ready that can compute prompts, and so serve without prefill."""
        return self.alone_count > 0

    @property
    def alone_count(self) -> int:
        """Number of ready decode workers that can compute prompts."""
        return sum(worker.facts.computes for worker in self.sides[Side.DECODE].ready)

    @property
    def uses_prefix_affinity(self) -> bool:
        """Whether placement has to know which worker was sent a prompt's prefix: some side has several
        workers, or a decode worker may compute prompts."""
        computes = any(worker.facts.computes for worker in islice(self.sides[Side.DECODE].known, 1))
        return computes or any(len(side.known) > 1 for side in self.sides.values())

    @property
    def all_full(self) -> bool:
        """Whether every client's request would have to wait, however small it is.

        That is so if decode has no space. It is also so if prefill has none, and no decode worker with space
        may get a request alone. A draining worker may still take back a retracted request.
        """
        prefill, decode = (self.sides[side] for side in (Side.PREFILL, Side.DECODE))
        if prefill.has_space and decode.has_space:
            return False
        largest = prefill.ready.tokens_max
        apart = self.pairs.broken_count() > 0
        alone = (each.facts for each in decode.with_space() if each.facts.computes)
        return not any(apart or facts.tokens_max > largest for facts in alone)

    def accepting_retracted(self) -> list[Incarnation]:
        """Return the draining decode workers that have some space for requests whose rooms they retracted."""
        return [
            incarnation
            for incarnation, worker in self.sides[Side.DECODE].draining.items()
            if worker.accepts_retracted and worker.rooms_left > 0 and worker.usage.can_start(1)
        ]

    def outlook(self, now_ms: int) -> Hashable:
        """Return a value that changes whenever the answer to "can any worker hold this request?" may have
        changed."""
        return tuple((workers.changes, self.expects(side, now_ms)) for side, workers in self.sides.items())

    @property
    def changes(self) -> int:
        """Number of times so far that a worker came, left, or changed its state. Only then does the answer
        change what all workers can hold."""
        return sum(workers.changes for workers in self.sides.values())

    def tokens_max(self, side: Side) -> int:
        """Return the most KV positions of a request on the largest worker of a side, in any state; 0 without
        workers."""
        return self.sides[side].tokens_max

    @property
    def tokens_max_alone(self) -> int:
        """Most KV positions of a request on decode workers that can compute prompts; 0 without any."""
        return self.sides[Side.DECODE].computing.tokens_max

    @property
    def decode_page_tokens(self) -> int:
        """Tokens per page of decode workers, the largest number if they differ; 1 without workers."""
        return max(self.sides[Side.DECODE].page_sizes, default=1)

    @property
    def quantize(self) -> str | None:
        """Quantization of the model's weights on all workers; None without workers."""
        return next((worker.facts.stack.quantize for worker in self._leases.values()), None)

    @property
    def engine(self) -> ServedEngine | None:
        """Engine of the stack, with the properties that all workers share; None without workers."""
        return served_engine(worker.facts for worker in self._leases.values())

    def tokens_max_now(self, side: Side) -> int:
        """Return the most KV positions of a request on the largest worker of a side that serves now or may
        again soon. If there is none, the largest of all counts."""
        return self.sides[side].tokens_max_now

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
            check_stack(worker.facts.stack, facts.stack)
        for side in self.sides.values():
            for page_tokens in side.page_sizes:
                check_pages(page_tokens, facts)

    def _expect(self, worker: Worker, now_ms: int) -> None:
        """Record that a lost worker, or one in its place, is expected soon, if the lost one was ever
        ready."""
        if worker.proven:
            self._expected_until_ms[worker.facts.side] = now_ms + EXPECTED_MS

    def _renew_lease(self, worker: Worker, now_ms: int) -> None:
        """Restart the lease of a worker: it lasts from now."""
        worker.lease_until_ms = now_ms + self.lease_ms
        self._leases[worker.facts.incarnation] = worker
        self._leases.move_to_end(worker.facts.incarnation)

    def _changed(self, worker: Worker) -> None:
        """Update the rankings of a worker's side, because the worker's state changed."""
        self.sides[worker.facts.side].changed(worker)

    def _loaded(self, worker: Worker) -> None:
        """Record that the load of a worker changed: its rooms, its weight, or its usage. The worker of the
        other side in its process shares that load."""
        self.sides[worker.facts.side].loaded(worker)
        if worker.twin is not None:
            self.sides[worker.twin.facts.side].loaded(worker.twin)

    def _link_twin(self, worker: Worker) -> None:
        """Link a worker with the other side of its process, if both are registered and name each other. A
        weight that was set since the other side registered is valid for both."""
        mine = worker.facts.other_side
        twin = None if mine is None else self._workers.get(mine.incarnation)
        theirs = None if twin is None else twin.facts.other_side
        if twin is None or theirs is None or twin.facts.side is worker.facts.side:
            return
        if theirs.incarnation == worker.facts.incarnation:
            worker.twin, twin.twin = twin, worker
            worker.weight = WEIGHT_TOTAL - twin.weight
            self._loaded(worker)

    def _unlink_twin(self, worker: Worker) -> None:
        twin, worker.twin = worker.twin, None
        if twin is not None:
            twin.twin = None
            self._loaded(twin)
