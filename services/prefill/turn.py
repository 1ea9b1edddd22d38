"""What does a prefill rank see, do and compute in a turn?

Queues, in the field's words: *bootstrap* (no destination yet), *waiting* (destination known, to be
computed), *inflight* (computed, not all written). A room's queue follows from its phase and from how much
of its prompt is computed; there are no lists beside the roster that could disagree with it.
"""

import asyncio
from collections import abc
from typing import Final, assert_never

from services.ids import RoomId
from services.pages.checksum import KvChecksum
from services.pages.holdings import Holdings
from services.pages.layout import KvLayout
from services.prefill.commands import Commands
from services.prefill.computing import Computing
from services.prefill.early_grants import EarlyGrants
from services.prefill.job import Job
from services.prefill.metrics import PrefillMetrics
from services.prefill.receivers import Receivers
from services.prefill.sending import Sending
from services.prefill.ways import Ways
from services.rooms.deadlines import Deadlines
from services.rooms.errors import Cause, Reason
from services.rooms.evidence import Finished
from services.rooms.phases import Effect, Phase, SenderEffect, Vote
from services.rooms.plurals import counted
from services.rooms.room import Room
from services.rooms.roster import Capacity, Roster
from services.rooms.sender import Sender
from services.rooms.timeline import Moment
from services.runtime.clock import Clock
from services.transfer.interface import Transfer
from services.wire.baton.v1 import inference_pb2, workers_pb2
from services.wire.census import census_to_wire
from services.wire.model_bounds import ModelBounds
from services.worker.callers import Callers
from services.worker.folds import Folds
from services.worker.mailbox import Mailbox
from services.worker.reporter import Reporter, wish_told
from services.worker.stepper import Stepper

EARLY_PER_PLACE: Final = 4
"""Grants of one receiver that may wait for their rooms: it grants no more rooms than it and this worker have
places for, and some of those may be over here already."""
SCORED_TOKENS: Final = 64
"""Of a step, where nobody says how many the engine scores at once."""
HEARTBEAT_S: Final = 1.0
POLL_S: Final = 0.001
DRAIN_S: Final = 0.01
"""While a room that failed waits for its writes to end."""
LOOKS_MAX: Final = 16
"""Turns without a pause, while no step runs, after something of what is under way has moved: most writes end
sooner than the shortest pause."""


class PrefillWork:
    """The prefill side of `services.worker.turns.Work`. Every table is keyed by room or by incarnation,
    and emptied by `_retire` or when its worker has departed."""

    def __init__(
        self,
        *,
        places: int,
        holdings: Holdings,
        layout: KvLayout,
        bounds: ModelBounds,
        stepper: Stepper,
        transfer: Transfer,
        mailbox: Mailbox,
        reporter: Reporter,
        metrics: PrefillMetrics,
        clock: Clock,
        deadlines: Deadlines,
        chunk_tokens: int,
        window_bytes: int,
        ways: Ways,
        checksum: KvChecksum = KvChecksum.RECORD,
        folds: Folds | None = None,
        scored_tokens: int = SCORED_TOKENS,
    ) -> None:
        """`folds`: of the rank that draws. `scored_tokens`: most of a step that score a prompt."""
        self.roster: Roster[Sender] = Roster(places)
        self.callers: Callers[inference_pb2.RunRoomReply] = Callers(mailbox, self.roster)
        self.receivers = Receivers()
        self.early = EarlyGrants(EARLY_PER_PLACE * places)
        self._holdings = holdings
        self._page_tokens = layout.page_tokens
        self._transfer = transfer
        self._mailbox = mailbox
        self._reporter = reporter
        self._metrics = metrics
        self._clock = clock
        self._jobs: dict[RoomId, Job] = {}
        self._folds = Folds(None, mailbox.wake) if folds is None else folds
        self._commands = Commands(
            roster=self.roster,
            jobs=self._jobs,
            callers=self.callers,
            receivers=self.receivers,
            early=self.early,
            ways=ways,
            bounds=bounds,
            folds=self._folds,
            layout=layout,
            cache_pages=len(holdings.pages),
            deadlines=deadlines,
            mailbox=mailbox,
            reporter=reporter,
            clock=clock,
        )
        self._computing = Computing(
            stepper, chunk_tokens, scored_tokens, reporter=reporter, metrics=metrics, clock=clock
        )
        self._sending = Sending(
            transfer,
            holdings.slots,
            layout.page_tokens,
            window_bytes,
            checksum,
            reporter=reporter,
            metrics=metrics,
            clock=clock,
        )
        self._turns = 0
        self._looks = 0
        """Turns without a pause, from here on."""
        self._held_back = False
        """Nothing is posted in this turn. Never twice in a row, however fast steps are."""

    # ---- what the handlers of the leader call

    @property
    def draining(self) -> bool:
        return self._commands.draining

    def quiet(self, room: RoomId) -> asyncio.Future[None]:
        """Of a room that was closed: done when it is proven that nothing is or will be written for it
        (`ack-is-proof`), however long that takes. To be cancelled by whoever waits no longer."""
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        job = self._jobs.get(room)
        if job is None:
            closed.set_result(None)
        else:
            job.closers.add(closed)
            closed.add_done_callback(job.closers.discard)
        return closed

    def names_of(self, room: RoomId) -> abc.Mapping[str, str]:
        """What a room's request is known by; nothing once it is retired."""
        job = self._jobs.get(room)
        return {} if job is None else job.request.names

    def break_off(self, cause: Cause) -> None:
        """This worker ends here and now, in the middle of a turn it may be: tell whoever was not told how its
        room ended, with what ended it before if anything did (`first-cause-wins`). What is sealed is handed
        over. Nothing is given back: all that is held ends with the process."""
        for job in self._jobs.values():
            if not job.outcome_told:
                sealed = job.sender.phase is Phase.SUCCESS
                job.tell_outcome(None if sealed else job.sender.cause or cause)

    def census(self) -> workers_pb2.WorkerCensus:
        """What is held right now, for people to look at."""
        rooms = self.roster.census()
        return census_to_wire(self._queues(rooms), rooms, self._holdings, self._turns, self._computing.tokens)

    # ---- Work

    def take_commands(self) -> bytes:
        return self._mailbox.take()

    def apply(self, commands: bytes) -> None:
        self._commands.apply(commands)

    def see(self) -> bool:
        news = self._computing.see(self._jobs.values())
        self._held_back = news and not self._held_back
        news |= self._folds.see()
        self._transfer.notices()
        # Posting may copy: first tokens leave before their pages do, and the next step starts.
        if not self._held_back and self._sending.send(self._jobs, beside=not self._computing.free):
            news, self._looks = True, LOOKS_MAX
        for job in list(self._jobs.values()):
            if job.sender.phase is Phase.FAILED and job.sender.proof is None and not job.sender.busy:
                news |= self._sending.see_quiet(job)
        return news

    def capacity(self) -> Capacity:
        holdings = self._holdings
        return Capacity(holdings.available, holdings.slots.free, holdings.prefixes.digest)

    def may_compute(self) -> bool:
        return self._computing.free

    def may_leave(self) -> bool:
        return self.draining and not self._jobs and self._mailbox.empty

    def connects(self) -> int:
        return self._commands.connects()

    def agreed(self, connects: int) -> None:
        self._commands.agreed(connects)

    def told(self) -> bytes | None:
        return None

    def hear(self, told: abc.Sequence[bytes]) -> None:  # noqa: ARG002
        raise AssertionError("the ranks of a prefill worker tell each other nothing")

    def voted(self, room: Room, wish: Vote, now_ms: int) -> None:
        job = self._jobs[room.id]
        if job.voted != (room.phase, wish):
            job.voted = (room.phase, wish)
            self._reporter.seen(room.id, Moment.VOTED, wish_told(room, wish, now_ms))

    def perform(self, room: Room, effect: Effect | SenderEffect) -> None:
        job = self._jobs[room.id]
        match effect:
            case Effect.QUEUE:
                self._reporter.note(room.id, Moment.DESTINATION_KNOWN)
            case SenderEffect.COMPUTE:
                self._begin(job)
            case SenderEffect.SEAL:
                self._seal(job)
            case SenderEffect.REPORT:
                job.tell_outcome(None)
                job.sender.note(Finished())
            case Effect.STOP:
                self._distrust(room)
                self._reporter.note(room.id, Moment.STOPPED, "after its outcome was reported")
            case Effect.FENCE:
                self._distrust(room)
                self._fail(job)
            case Effect.RELEASE:
                self._retire(job)
            case _:
                assert_never(effect)

    def compute(self) -> bool:
        self._computing.start(self._jobs.values())
        return False

    def record(self, agreement_s: float) -> None:
        census = self.roster.census()
        self._metrics.worker.record_turn(agreement_s, self._reporter.dropped)
        self._metrics.worker.record_rooms(census, self.roster.dropped.total())
        self._metrics.worker.record_memory(self._holdings.pages.census(), self._holdings.slots.census())
        self._metrics.record_queues(**self._queues(census))
        self._turns += 1

    async def rest(self) -> bool:
        if self._looks and self._computing.free and self._under_way():
            self._looks -= 1
            await asyncio.sleep(0)
            return self._mailbox.news.is_set()
        return await self._mailbox.rest(self._rest_s())

    async def pause(self, most_s: float) -> None:
        await self._mailbox.rest(most_s)

    # ---- effects

    def _begin(self, job: Job) -> None:
        sender = job.sender
        holding = self._holdings.take(sender.id, sender.pages_needed, job.reusable, job.request.salt)
        job.pages = holding.pages
        job.cached = job.computed = holding.shared * self._page_tokens
        self._metrics.worker.reused(job.cached, job.request.prefill_tokens)
        self._sending.begin(job, holding.slot)
        detail = f"{counted(len(holding.pages), 'page')}, {counted(job.cached, 'token')} cached"
        self._reporter.note(sender.id, Moment.COMPUTING, detail)

    def _seal(self, job: Job) -> None:
        """The pages of every rank are there: the elected one says so to each rank of the receiver, and what
        is for later comes after that. No page is read any more: the seal is the slot's."""
        if job.sender.elected and job.push is not None:
            job.push.seal()
            self._sending.see(job, beside=not self._computing.free)
        self._holdings.keep(job.sender.id, job.tokens)

    def _distrust(self, room: Room) -> None:
        """A page that it shared may be why its step failed: nobody else is to begin with that, least of all
        the request's next room, which comes before this one is released."""
        if room.ended_for is Reason.ENGINE_FAILED:
            self._holdings.distrust(room.id)

    def _fail(self, job: Job) -> None:
        cause = job.sender.cause
        if cause is None:
            raise AssertionError(f"room {job.sender.id} failed without a cause")
        job.tell_outcome(cause)
        self._sending.failed(job)
        self._metrics.worker.room_failed(cause)
        self._reporter.failed(job.sender.id, cause)

    def _retire(self, job: Job) -> None:
        """The one way out of every table that knows the room (`one-retire`)."""
        sender = job.sender
        self._holdings.give_back(sender.id)
        self.roster.retire(sender.id, self._clock.now_ms())
        del self._jobs[sender.id]
        self._folds.forget(sender.id)
        for closed in list(job.closers):
            if not closed.done():
                closed.set_result(None)
        self._metrics.worker.room_retired(sender.phase_ms)
        self._reporter.retired(sender.id)

    # ---- small things

    def _queues(self, census: abc.Mapping[Phase, int]) -> dict[str, int]:
        waiting = sum(job.computable for job in self._jobs.values())
        return {
            "bootstrap": census[Phase.BOOTSTRAPPING],
            "waiting": census[Phase.WAITING_FOR_INPUT] + waiting,
            "inflight": census[Phase.TRANSFERRING] + census[Phase.SEALING] - waiting,
        }

    def _under_way(self) -> bool:
        return any(job.under_way for job in self._jobs.values())

    def _rest_s(self) -> float:
        if self._under_way():
            return POLL_S
        now_ms = self._clock.now_ms()
        rooms = [job.sender for job in self._jobs.values()]
        waits = [room.deadline_ms - now_ms for room in rooms if room.phase is not Phase.FAILED]
        most_s = DRAIN_S if any(job.unproven for job in self._jobs.values()) else HEARTBEAT_S
        return min([most_s, *(max(wait, 1) / 1000 for wait in waits)])
