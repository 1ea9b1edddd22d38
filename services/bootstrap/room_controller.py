"""What happens at the bootstrap when a room ends, or a worker comes or goes?

The registry decides; this makes it so: it ends rooms of lost workers with the true cause, tells the other
side at once (`terminal-reaches-peer`), wakes who waits for capacity or watches a room, and keeps time.
Rooms are opened by `admission`.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from baton.bootstrap.admission import Admission
from baton.bootstrap.credential_store import CredentialStore
from baton.bootstrap.failure_log import FailureLog
from baton.bootstrap.history import EMPTY_CENSUS, History
from baton.bootstrap.metrics import BootstrapMetrics, ExitRejection, Loss, computed_by
from baton.bootstrap.timelines import Timelines
from baton.bootstrap.worker_streams import WorkerStreams
from baton.fleet.registry import Registry
from baton.fleet.room_entry import RoomEntry, RoomPhase
from baton.fleet.worker_record import Worker
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause, NameInUse, NotGone, Reason, TurnStalled, UnknownRoom
from baton.rooms.phases import Side
from baton.rooms.reasons import LOST, REASONS
from baton.rooms.timeline import Moment
from baton.rooms.worker_facts import WorkerFacts
from baton.rooms.worker_load import WorkerLoad
from baton.runtime.clock import Clock
from baton.runtime.logging import Log
from baton.telemetry.room_spans import RoomSpans
from baton.wire.channel import Channels
from baton.wire.errors import NotProven
from baton.wire.liveness import LivenessProbe
from baton.wire.receiver_secret import digest_of
from baton.wire.service_role import ServiceRole

log = Log(__name__)

TICK_S: Final = 0.25
LOOK_S: Final = 0.01
SOON_S: Final = 0.002

ANSWERED: Final = Cause(Reason.ANSWERED, "it was answered")


class RoomController:
    """Used from one event loop."""

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        channels: Channels,
        metrics: BootstrapMetrics,
        max_queue: int,
        queue_timeout_ms: int,
        spans: RoomSpans | None = None,
        presence: LivenessProbe | None = None,
        max_wait_ms: int | None = None,
    ) -> None:
        """`presence`: asks workers whether they are there; None: by `channels`."""
        self._presence = presence or LivenessProbe(channels)
        self.credentials = CredentialStore()
        self.registry = registry
        self.clock = clock
        self.streams = WorkerStreams(channels, self.side_retired, self.update_load)
        self.history = History()
        self.timelines = Timelines(registry, clock, RoomSpans() if spans is None else spans)
        self.admission = Admission(
            registry, clock, self.timelines, metrics, max_queue, queue_timeout_ms, max_wait_ms
        )
        self._metrics = metrics
        self._failures = FailureLog(clock)
        self._on_end: dict[RoomId, Callable[[Cause], None]] = {}
        self._waking: asyncio.TimerHandle | None = None

    # ---- workers

    def register(self, facts: WorkerFacts, turn_ms: int = 0) -> None:
        self.registry.register(facts, self.clock.now_ms(), turn_ms)
        log.info("worker registered", worker=facts.name, side=facts.side.value, address=facts.address)
        self._resend_ends(facts)
        self.admission.wake()

    def renew(
        self,
        incarnation: Incarnation,
        census: Mapping[str, Any] = EMPTY_CENSUS,
        turn_ms: int = 0,
        load: WorkerLoad | None = None,
    ) -> None:
        """`census`, `load`: what the worker says it holds. `turn_ms`: for how long its turn has not ended.
        Raises TurnStalled, and then its rooms go on elsewhere."""
        try:
            self.registry.renew(incarnation, self.clock.now_ms(), turn_ms)
        except TurnStalled as error:
            self.lose(incarnation, str(error), proof=None, how=Loss.STALLED)
            raise
        if load is not None:
            self.registry.update_load(incarnation, load, self.clock.now_ms())
        self.history.record_census(incarnation, census, self.clock.now_ms())
        self._metrics.lease_renewed()
        self.admission.wake()

    def update_load(self, incarnation: Incarnation, load: WorkerLoad) -> None:
        """A worker says what it holds. Where that is less than was thought, those who wait are served SOON_S
        later: whoever's room ended with this very word waits by then, before those that came after it."""
        more = self.registry.update_load(incarnation, load, self.clock.now_ms())
        if more and self._waking is None:
            self._waking = asyncio.get_running_loop().call_later(SOON_S, self._wake)

    def _wake(self) -> None:
        self._waking = None
        self.admission.wake()

    def proven(self, incarnation: Incarnation) -> None:
        """A canary hand-over passed: the worker may have rooms, if it has not left meanwhile."""
        worker = self.registry.mark_proven(incarnation)
        if worker is not None:
            log.info("worker ready", worker=worker.name)
            self.admission.wake()

    def weigh(self, process: str, prefill: int) -> None:
        """A process that serves both sides is placed on by this weight from now on (`Registry.weigh`). Raises
        UnknownWorker."""
        self.registry.weigh(process, prefill)
        log.info("a process was given another weight", process=process, prefill=prefill)
        self.admission.wake()

    async def check_name_is_free(self, name: str, incarnation: Incarnation) -> None:
        """A silent worker that answers keeps its name. That another gets the name proves nothing of it.

        Raises NameInUse.
        """
        for silent in self.registry.silent(name):
            facts = self.registry.facts_of(silent)
            if facts is None or silent == incarnation:
                continue
            if await self._presence.answers(facts.address, ServiceRole.of(facts.side), silent):
                log.warning("a name was not given to another worker", worker=name, address=facts.address)
                raise NameInUse(f"{name} is incarnation {silent}, which answers, though its lease ran out")

    async def report_exit(self, name: str, pid: int, secret: bytes) -> None:
        """A process of a worker has exited, says the starter of that very process (`exit-by-starter`).

        The starter shows the secret whose digest the process registered. Silence beside anybody else's report
        proves nothing (`proof-not-time`): a stopped process may still write. One that answers is not gone.

        Raises NotProven and NotGone.
        """
        ended = self.registry.exited(name, pid, digest_of(secret))
        if not ended and self.registry.of_process(name, pid):
            self._refuse_exit(name, pid, ExitRejection.UNPROVEN)
            raise NotProven(f"the exit of {name}, process {pid}, is for its starter to report: wrong secret")
        for incarnation in ended:
            facts = self.registry.facts_of(incarnation)
            if facts and await self._presence.answers(facts.address, ServiceRole.of(facts.side), incarnation):
                self._refuse_exit(name, pid, ExitRejection.ANSWERS)
                raise NotGone(f"{name}, process {pid}, is not taken for gone: it answers")
        for incarnation in ended:
            self.lose(incarnation, "its process exited", proof=Loss.EXITED.value)

    def _refuse_exit(self, name: str, pid: int, why: ExitRejection) -> None:
        self._metrics.exit_not_believed(why)
        log.warning("an exit was not believed", worker=name, pid=pid, why=why.value)

    def lose(self, incarnation: Incarnation, why: str, *, proof: str | None, how: Loss = Loss.SILENT) -> None:
        """A worker is gone, or, without a proof, lost in this way. Its rooms end now, with that cause."""
        known = self.registry.holds_lease(incarnation)
        worker = self.registry.worker(incarnation) if known else None
        ended = 0 if worker is None else sum(_ends_with(worker, self.registry.get(r)) for r in worker.rooms)
        rooms = self.registry.leave(incarnation, proof, self.clock.now_ms())
        if worker is None:
            return
        facts = worker.facts
        if proof == Loss.LEFT.value and not ended:
            log.info("worker left", worker=facts.name)
        else:
            log.warning("worker lost", worker=facts.name, cause=why, rooms=ended)
        self.history.worker_lost(facts, why, self.clock.wall_ms(), ended)
        self._metrics.worker_lost(facts.side, how if proof is None else Loss(proof))
        for entry in rooms:
            cause = Cause(LOST[facts.side], f"{facts.side.value} worker {facts.name}: {why}")
            self.fail(entry.id, cause)
            self.timelines.wake(entry.id)
        self.streams.drop(incarnation)
        self.admission.wake()

    def _resend_ends(self, facts: WorkerFacts) -> None:
        """A worker that is back after a silence was told of no end meanwhile: rooms that it may never have
        heard of still wait for it (`terminal-reaches-peer`)."""
        for entry in self.registry.open_rooms_of(facts.incarnation):
            if facts.side in entry.waiting_for and entry.phase is RoomPhase.CLOSING:
                self._send_over(entry, entry.cause or ANSWERED)

    # ---- rooms

    def follow(self, room: RoomId, on_end: Callable[[Cause], None]) -> None:
        """Call `on_end` when the room is failed from outside its own streams: at once if it was, between its
        opening and this. Both workers are about to be asked for it."""
        self.registry.mark_delivered(room, self.registry.get(room).sides)
        cause = self.registry.get(room).cause
        if cause is None:
            self._on_end[room] = on_end
        else:
            on_end(cause)

    def answered(self, room: RoomId, how: str = "") -> bool:
        """The client has all that it asked for. False when the room had ended before."""
        self._on_end.pop(room, None)
        ended = self.registry.end(room, None, self.clock.now_ms())
        if ended:
            self.admission.expected.ended(room, is_over=True)
            self._note_pair(self.registry.get(room), None)
            self.timelines.report(room, Moment.ANSWERED, how)
            self.timelines.end(room)
        return ended

    def stop(self, room: RoomId) -> None:
        """The client has all that it asked for, and the workers do not know it: stop them."""
        cause = Cause(Reason.ANSWERED, "a stop string was reached")
        if self.answered(room, cause.text):
            self._send_over(self.registry.get(room), cause)

    def fail(self, room: RoomId, cause: Cause) -> None:
        """End a room with its first cause, tell both sides, and whoever follows it. Idempotent."""
        if not self.registry.end(room, cause, self.clock.now_ms()):
            return
        entry = self.registry.get(room)
        has_failed = REASONS[cause.reason].is_attempt
        self.admission.expected.ended(room, is_over=not REASONS[cause.reason].is_retried)
        if has_failed:
            self.timelines.report(room, Moment.FAILED, f"{cause.reason.value}: {cause.text}")
        else:
            self.timelines.report(room, Moment.RETRACTED, cause.text)
        self.timelines.end(room, cause)
        self._failures.log(room, cause)
        self._note_pair(entry, cause)
        self._metrics.room_ended_early(cause, canary=entry.canary)
        self._send_over(entry, cause)
        on_end = self._on_end.pop(room, None)
        if on_end is not None:
            goes_back = entry.is_returned and REASONS[cause.reason].is_retried
            if not entry.canary and (goes_back or not has_failed):
                self.admission.owe(entry)
            on_end(cause)
        elif not has_failed:
            self.timelines.report(room, Moment.GIVEN_UP, "its caller drives it, and may open another room")

    def fail_rest(self, entry: RoomEntry, cause: Cause) -> None:
        """One side failed after the room was answered: the other has nothing to wait for any more."""
        if entry.cause is None and entry.waiting_for and cause.reason is not Reason.ANSWERED:
            self._send_over(entry, cause)

    def not_retried(self, room: RoomId, why: str) -> None:
        """A room ended early and no other follows it, though its reader wants more: its request has failed,
        whatever became of the room."""
        self.timelines.report(room, Moment.NOT_RETRIED, why)
        with suppress(UnknownRoom):
            self.registry.index.failed(self.registry.get(room))

    def computed(self, entry: RoomEntry, side: Side, tokens: int) -> None:
        """That side computed so many tokens of the room's prompt."""
        if not entry.canary:
            self._metrics.prompt_computed(side, tokens, computed_by(side, entry))

    def resumed(self, since_ms: int, recomputed_tokens: int) -> None:
        """A request whose room was retracted at `since_ms` has its next token, or its end."""
        self._metrics.resumed((self.clock.now_ms() - since_ms) / 1000, recomputed_tokens)

    def side_retired(self, room: RoomId, side: Side) -> None:
        with suppress(UnknownRoom):
            entry = self.registry.get(room)
            self.streams.forget(entry.worker(side).incarnation, room)
        self.registry.side_retired(room, side)
        self.timelines.wake(room)
        self.admission.wake()

    def _note_pair(self, entry: RoomEntry, cause: Cause | None) -> None:
        """A room that nothing was handed over in says nothing of its workers' way to each other."""
        if entry.pair is None or not all(map(self.registry.holds_lease, entry.pair)):
            return
        if self.registry.pairs.ended(entry.pair, cause, canary=entry.canary):
            names = {side.value: name for side, name in entry.names.items()}
            if cause is None:
                log.info("a pair of workers connects again", **names)
                self.admission.wake()
            else:
                log.warning("a pair of workers does not connect", cause=cause.text, **names)

    def _send_over(self, entry: RoomEntry, cause: Cause) -> None:
        """Tell the workers that may still hold the room, and are there, why it is over."""
        for side in [each for each in Side if each in entry.waiting_for]:
            facts = entry.worker(side)
            if self.registry.holds_lease(facts.incarnation):
                self.streams.to(facts).cancel(entry.id, cause)

    def _is_needed(self, incarnation: Incarnation) -> bool:
        """The worker is there, or a room that is not retired has it."""
        return self.registry.holds_lease(incarnation) or self.registry.has_open_rooms(incarnation)

    # ---- time

    async def keep_time(self, heard_ms: Callable[[], int] | None = None) -> None:
        """Take a `look` now and then, until cancelled. `heard_ms`: as of `look`, at each time."""
        while True:
            self.look(None if heard_ms is None else heard_ms())
            await asyncio.sleep(TICK_S)

    def look(self, heard_ms: int | None = None) -> None:
        """Expire leases and overdue rooms, and have the queue looked at again. `heard_ms`: what was said to
        this process before then was taken note of."""
        now_ms = self.clock.now_ms()
        for incarnation in self.registry.expired(now_ms, heard_ms):
            self.lose(incarnation, "its lease ran out", proof=None)
        for entry in self.registry.orphans(now_ms):
            self.fail(entry.id, Cause(Reason.DEADLINE, _why_unended(entry)))
        for entry in self.registry.overdue(now_ms):
            sides = ", ".join(sorted(side.value for side in entry.waiting_for))
            self.timelines.report(entry.id, Moment.FILED, f"not reported retired by {sides}")
            for facts in entry.workers:
                self.streams.forget(facts.incarnation, entry.id)
            self.registry.abandon(entry.id)
            self.timelines.wake(entry.id)
        self.admission.wake()
        self.streams.close_unused(self._is_needed)
        self._failures.log_rest()

    def end_all(self, cause: Cause) -> None:
        """The process ends before all that was promised is kept (`drain-keeps-promises`): whoever is served,
        or waits to be, is told so while there is time for it."""
        self.admission.close(cause)
        for entry in self.registry.open_rooms():
            self.fail(entry.id, cause)

    async def finish(self) -> None:
        """Wait until workers were told what they are to be told, and for the last words of rooms."""
        while self.streams.rooms():  # noqa: ASYNC110 - once, while the process ends
            await asyncio.sleep(LOOK_S)


def _ends_with(worker: Worker, entry: RoomEntry) -> bool:
    """Its streams may have broken off, and ended the room, before the worker was known to be gone."""
    broke_off = entry.cause is not None and entry.cause.reason is LOST[worker.facts.side]
    return broke_off or (entry.phase is not RoomPhase.CLOSING and entry.needs(worker.facts.incarnation))


def _why_unended(entry: RoomEntry) -> str:
    sides = " and ".join(sorted(side.value for side in entry.waits_for_opener))
    return f"its opener never brought it to {sides}" if sides else "nobody ended the room in time"
