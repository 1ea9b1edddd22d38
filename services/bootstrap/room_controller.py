"""Actions of the router when a room ends, or when a worker comes or goes.

The registry decides. This module ends rooms of lost workers with the true cause, and informs the worker of
the other side at once (`terminal-reaches-peer`). It wakes queued requests and watchers, and checks deadlines.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from baton.bootstrap.admission.admission import Admission
from baton.bootstrap.admission.orphan_table import OrphanTable
from baton.bootstrap.credential_store import CredentialStore, draw_opener
from baton.bootstrap.failure_log import FailureLog
from baton.bootstrap.history import EMPTY_CENSUS, History
from baton.bootstrap.kv_event_streams import KvEventStreams
from baton.bootstrap.metrics import BootstrapMetrics, ExitRejection, Loss, computed_by
from baton.bootstrap.timelines import Timelines
from baton.bootstrap.worker_streams import WorkerStreams
from baton.fleet.registry import Registry
from baton.fleet.room_entry import RoomEntry, RoomPhase
from baton.fleet.worker_record import Worker
from baton.handover.opener_messages import ANSWERED
from baton.ids import Incarnation, Opener, RoomId
from baton.rooms.errors import Cause, NameInUse, NotGone, Reason, TurnStalled, UnknownRoom
from baton.rooms.phases import Side
from baton.rooms.reasons import REASONS
from baton.rooms.timeline import Moment
from baton.rooms.worker_facts import WorkerFacts
from baton.rooms.worker_load import WorkerLoad
from baton.runtime.clock import Clock
from baton.runtime.logging import Log
from baton.telemetry.room_spans import RoomSpans
from baton.wire.channel import Channels
from baton.wire.errors import NotProven
from baton.wire.liveness import LivenessProbe
from baton.wire.load_messages import Orphan
from baton.wire.receiver_secret import digest_of
from baton.wire.service_role import ServiceRole

log = Log(__name__)

TICK_S: Final = 0.25
LOOK_S: Final = 0.01
SOON_S: Final = 0.002


class RoomController:
    """Controller that carries out the registry's decisions about rooms and workers. Used from one event
    loop."""

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
        kv_events: KvEventStreams | None = None,
        opener: Opener | None = None,
    ) -> None:
        """Make a controller.

        `presence`: probe that checks whether a worker's process answers. None: a probe that calls over
        `channels`. `kv_events`: reader of the logs of workers' prefix caches. None: no log is read. `opener`:
        id of this run of the router. None: one is drawn.
        """
        self.opener = draw_opener() if opener is None else opener
        self._presence = presence or LivenessProbe(channels)
        self.credentials = CredentialStore()
        self.orphans = OrphanTable()
        self.registry = registry
        self.clock = clock
        self.streams = WorkerStreams(channels, self.side_retired, self.update_load, self.opener)
        self.kv_events = kv_events
        self.history = History()
        self.timelines = Timelines(registry, clock, RoomSpans() if spans is None else spans)
        self.admission = Admission(
            registry, clock, self.timelines, metrics, max_queue, queue_timeout_ms, max_wait_ms
        )
        self._metrics = metrics
        self._failures = FailureLog(clock)
        self.followers: dict[RoomId, Callable[[Cause], None]] = {}
        self._waking: asyncio.TimerHandle | None = None

    # ---- workers

    def register(self, facts: WorkerFacts, turn_ms: int = 0) -> None:
        was_known = self.registry.model.weights_known
        self.registry.register(facts, self.clock.now_ms(), turn_ms)
        if not was_known:
            log.info("these weights are served from now on", worker=facts.name, model=facts.model)
        log.info("worker registered", worker=facts.name, side=facts.side.value, address=facts.address)
        if self.kv_events is not None:
            self.kv_events.follow(facts)
        self._resend_ends(facts)
        self.admission.wake()

    def renew(
        self,
        incarnation: Incarnation,
        census: Mapping[str, Any] = EMPTY_CENSUS,
        turn_ms: int = 0,
        load: WorkerLoad | None = None,
        orphans: Sequence[Orphan] = (),
    ) -> None:
        """Renew a worker's lease. Raises TurnStalled if the worker's last turn is too long ago. In that case
        its requests continue on other workers.

        `census`, `load`: as the worker reports them. `turn_ms`: milliseconds since its last turn ended.
        `orphans`: all its rooms that this router may adopt.
        """
        try:
            self.registry.renew(incarnation, self.clock.now_ms(), turn_ms)
        except TurnStalled as error:
            self.lose(incarnation, str(error), proof=None, how=Loss.STALLED)
            raise
        if load is not None:
            self.registry.update_load(incarnation, load, self.clock.now_ms())
        self.orphans.update(incarnation, orphans)
        self.history.record_census(incarnation, census, self.clock.now_ms())
        self._metrics.lease_renewed()
        self.admission.wake()

    def update_load(self, incarnation: Incarnation, load: WorkerLoad) -> None:
        """Process a worker's report of its load. If the worker has more space than was assumed, the queue is
        served after SOON_S.

        The message with the report may also have ended rooms. Because of the delay, the requests that
        continue after these rooms are in the queue as well.
        """
        more = self.registry.update_load(incarnation, load, self.clock.now_ms())
        if more and self._waking is None:
            self._waking = asyncio.get_running_loop().call_later(SOON_S, self._wake)

    def _wake(self) -> None:
        self._waking = None
        self.admission.wake()

    def proven(self, incarnation: Incarnation) -> None:
        """Record that a canary (test request) passed through a worker, so that the worker gets rooms, if it
        has not left meanwhile."""
        worker = self.registry.mark_proven(incarnation)
        if worker is not None:
            log.info("worker ready", worker=worker.name)
            self.admission.wake()

    def weigh(self, process: str, prefill: int) -> None:
        """Set the prefill weight of a process that serves both sides, from now on (`Registry.weigh`). Raises
        UnknownWorker."""
        self.registry.weigh(process, prefill)
        log.info("a process was given another weight", process=process, prefill=prefill)
        self.admission.wake()

    async def check_name_is_free(self, name: str, incarnation: Incarnation) -> None:
        """Check that no worker with this name still answers although its lease ran out. If another process
        takes the name, that does not prove that the worker is gone.

        So a registration never declares the former holder gone, here or at another router. A router that
        knew the former holder keeps it as silent. One that never knew it has nothing to declare. The proof
        is a Leave or the report of an exit, which workers and their starters send to every router. Raises
        NameInUse.
        """
        for silent in self.registry.silent(name):
            facts = self.registry.facts_of(silent)
            if facts is None or silent == incarnation:
                continue
            if await self._presence.answers(facts.address, ServiceRole.of(facts.side), silent):
                log.warning("a name was not given to another worker", worker=name, address=facts.address)
                raise NameInUse(f"{name} is incarnation {silent}, which answers, though its lease ran out")

    async def report_exit(self, name: str, pid: int, secret: bytes) -> None:
        """Take the report that a worker's process has exited, which only its starter may make
        (`exit-by-starter`).

        The starter shows the secret whose digest the process registered. A silent worker and a report without
        the secret prove nothing (`proof-not-time`): a stopped process may still write. A process that answers
        is not gone.

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
        """Remove a worker that is gone, and end its rooms with the cause `why`.

        `proof`: evidence that its process has ended, or None. `how`: way in which the worker was lost, if
        there is no proof.
        """
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
            self.fail(entry.id, facts.loss(why))
            self.timelines.wake(entry.id)
        self.streams.drop(incarnation)
        self.orphans.update(incarnation, ())
        if self.kv_events is not None:
            self.kv_events.drop(incarnation)
        self.admission.wake()

    def _resend_ends(self, facts: WorkerFacts) -> None:
        """Send the ends of rooms that a worker missed while it was silent. It may never have got some of
        these rooms, which still wait for it (`terminal-reaches-peer`)."""
        for entry in self.registry.ends_to_resend(facts):
            self.send_end(entry, entry.cause or ANSWERED)

    # ---- rooms

    def follow(self, room: RoomId, on_end: Callable[[Cause], None]) -> None:
        """Register a function that is called with the cause when the room ends early. If it has already
        ended, the function is called at once. The caller is about to send the room to both workers."""
        self.registry.mark_delivered(room, self.registry.get(room).sides)
        cause = self.registry.get(room).cause
        if cause is None:
            self.followers[room] = on_end
        else:
            on_end(cause)

    def not_adopted(self, room: RoomId, cause: Cause) -> None:
        """Forget a room that this router could not adopt."""
        self.followers.pop(room, None)
        self.registry.end(room, cause, self.clock.now_ms())
        self.registry.abandon(room)
        self.timelines.report(room, Moment.NOT_ADOPTED, cause.text)
        self.timelines.end(room)

    def answered(self, room: RoomId, how: str = "") -> bool:
        """Record that the client has its complete response. Return False if the room had already ended."""
        self.followers.pop(room, None)
        ended = self.registry.end(room, None, self.clock.now_ms())
        if ended:
            self.admission.expected.ended(room, is_over=True)
            self._note_pair(self.registry.get(room), None)
            self.timelines.report(room, Moment.ANSWERED, how)
            self.timelines.end(room)
        return ended

    def stop(self, room: RoomId) -> None:
        """End a room on its workers, because its client already has the complete response. This happens when
        a stop string is found, which workers do not look for."""
        cause = Cause(Reason.ANSWERED, "a stop string was reached")
        if self.answered(room, cause.text):
            self.send_end(self.registry.get(room), cause)

    def fail(self, room: RoomId, cause: Cause) -> None:
        """End a room with its first cause, and inform its workers and stream. A second call has no effect."""
        if not self.registry.end(room, cause, self.clock.now_ms()):
            return
        entry = self.registry.get(room)
        has_failed = REASONS[cause.reason].is_attempt
        self.admission.expected.ended(room, is_over=not REASONS[cause.reason].is_retried)
        if has_failed:
            self.timelines.report(room, Moment.FAILED, f"{cause.reason.value}: {cause.text}")
        elif cause.reason is Reason.WORKER_FULL:
            self.timelines.report(room, Moment.WORKER_FULL, cause.text)
        else:
            self.timelines.report(room, Moment.RETRACTED, cause.text)
        self.timelines.end(room, cause)
        self._failures.log(room, cause)
        self._note_pair(entry, cause)
        self._metrics.room_ended_early(cause, canary=entry.canary)
        self.send_end(entry, cause)
        on_end = self.followers.pop(room, None)
        if on_end is not None:
            goes_back = entry.is_returned and REASONS[cause.reason].is_retried
            if not entry.canary and (goes_back or cause.reason is Reason.RETRACTED):
                self.admission.promises.add(entry)
            on_end(cause)
        elif not has_failed:
            self.timelines.report(room, Moment.GIVEN_UP, "its caller drives it, and may open another room")

    def not_retried(self, room: RoomId, why: str) -> None:
        """Record that no other room follows a room that ended early, although its client wants more
        tokens."""
        self.timelines.report(room, Moment.NOT_RETRIED, why)
        with suppress(UnknownRoom):
            self.registry.index.failed(self.registry.get(room))

    def computed(self, entry: RoomEntry, side: Side, tokens: int) -> None:
        """Count a room's prompt in the metrics as computed on this side. `tokens`: number of its tokens that
        were not cached."""
        if not entry.canary:
            self._metrics.prompt_computed(side, tokens, computed_by(side, entry))

    def resumed(self, since_ms: int, recomputed_tokens: int) -> None:
        """Record how long a request paused after its room was retracted (preempted) at `since_ms`. Called
        when its next token comes, or when it ends."""
        self._metrics.resumed((self.clock.now_ms() - since_ms) / 1000, recomputed_tokens)

    def side_retired(self, room: RoomId, side: Side) -> None:
        with suppress(UnknownRoom):
            entry = self.registry.get(room)
            self.streams.forget(entry.worker(side).incarnation, room)
        self.registry.side_retired(room, side)
        self.timelines.wake(room)
        self.admission.wake()

    def _note_pair(self, entry: RoomEntry, cause: Cause | None) -> None:
        """Record how a room ended, for the health of its pair of workers. A room without a hand-over shows
        nothing about their connection."""
        if entry.pair is None or not all(map(self.registry.holds_lease, entry.pair)):
            return
        if self.registry.pairs.ended(entry.pair, cause, canary=entry.canary):
            names = {side.value: name for side, name in entry.names.items()}
            if cause is None:
                log.info("a pair of workers connects again", **names)
                self.admission.wake()
            else:
                log.warning("a pair of workers does not connect", cause=cause.text, **names)

    def send_end(self, entry: RoomEntry, cause: Cause) -> None:
        """Send the end of a room to each of its workers that holds a lease and may still hold the room."""
        for side in self.registry.sides_to_end(entry):
            self.streams.to(entry.worker(side)).cancel(entry.id, cause)

    def _is_needed(self, incarnation: Incarnation) -> bool:
        """Return whether the router calls this worker: it has a lease, or a room that is not retired."""
        return self.registry.holds_lease(incarnation) or self.registry.has_open_rooms(incarnation)

    # ---- time

    async def keep_time(self, accepted_ms: Callable[[], int] | None = None) -> None:
        """Call `look` regularly until cancelled. `accepted_ms`: function that returns the argument of each
        call."""
        while True:
            self.look(None if accepted_ms is None else accepted_ms())
            await asyncio.sleep(TICK_S)

    def look(self, accepted_ms: int | None = None) -> None:
        """Do what is due now: end expired leases and overdue rooms, and serve the queue. `accepted_ms`: see
        `accepted_until_ms` of `Registry.expired`."""
        now_ms = self.clock.now_ms()
        for incarnation in self.registry.expired(now_ms, accepted_ms):
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
        """End all rooms and refuse all requests, because the process stops before they are answered
        (`drain-keeps-promises`)."""
        self.admission.close(cause)
        for entry in self.registry.open_rooms():
            self.fail(entry.id, cause)

    async def finish(self) -> None:
        """Wait until all messages to workers are sent, and rooms have reported their last lines."""
        while self.streams.rooms():  # noqa: ASYNC110 - once, while the process ends
            await asyncio.sleep(LOOK_S)


def _ends_with(worker: Worker, entry: RoomEntry) -> bool:
    """Return whether the loss of a worker ends this room. The room also counts if a broken stream has ended
    it before the loss was known."""
    broke_off = entry.cause is not None and entry.cause.reason is worker.facts.loss("").reason
    return broke_off or (entry.phase is not RoomPhase.CLOSING and entry.needs(worker.facts.incarnation))


def _why_unended(entry: RoomEntry) -> str:
    sides = " and ".join(sorted(side.value for side in entry.waits_for_opener))
    return f"its opener never brought it to {sides}" if sides else "nobody ended the room in time"
