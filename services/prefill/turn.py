"""What does a prefill rank see, do and compute in a turn?

Queues, in the field's words: *bootstrap* (no destination yet), *waiting* (destination known, to be
computed), *inflight* (computed, not all written). A room's queue follows from its phase and from how much
of its prompt is computed; there are no lists beside the roster that could disagree with it.
"""

import asyncio
from collections import abc
from typing import Final, assert_never

from services.handover.requests import (
    BeginWrites,
    Forget,
    Outcome,
    Report,
    Retired,
    SenderRequest,
    SendPages,
    SendRecord,
    SendSeal,
)
from services.handover.sending import Sending
from services.ids import RoomId
from services.pages.checksum import KvChecksum
from services.pages.errors import LayoutMismatch, Truncated
from services.prefill.commands import PrefillCommands
from services.prefill.computing import Prefilling
from services.prefill.early_grants import EarlyGrants
from services.prefill.metrics import PrefillMetrics
from services.prefill.pushes import Pushes
from services.prefill.receivers import Receivers
from services.prefill.room import PrefillRoom
from services.prefill.ways import Ways
from services.rooms.errors import Cause, PeerFault, Refusal
from services.rooms.phases import Effect, Phase, SenderEffect, Vote
from services.rooms.queues import RoomQueue
from services.rooms.roster import Capacity
from services.rooms.timeline import Moment
from services.runtime.clock import Clock
from services.transfer.interface import Transfer
from services.wire.baton.v1 import group_pb2, inference_pb2, workers_pb2
from services.wire.census import census_to_wire
from services.wire.model_bounds import ModelBounds
from services.worker.callers import Callers
from services.worker.folds import Folds
from services.worker.mailbox import Answer, Mailbox
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
    """The prefill side of `services.worker.turns.Work`: it tells the hand-over what comes in and what becomes
    known, and carries out what that asks."""

    def __init__(
        self,
        sending: Sending[PrefillRoom],
        *,
        bounds: ModelBounds,
        stepper: Stepper,
        transfer: Transfer,
        mailbox: Mailbox,
        reporter: Reporter,
        metrics: PrefillMetrics,
        clock: Clock,
        chunk_tokens: int,
        window_bytes: int,
        ways: Ways,
        checksum: KvChecksum = KvChecksum.RECORD,
        folds: Folds | None = None,
        scored_tokens: int = SCORED_TOKENS,
    ) -> None:
        """`folds`: of the rank that draws. `scored_tokens`: most of a step that score a prompt."""
        self.roster = sending.roster
        self.callers: Callers[inference_pb2.RunRoomReply] = Callers(mailbox, self.roster)
        self.receivers = Receivers()
        self.early = EarlyGrants(EARLY_PER_PLACE * self.roster.places)
        self._sending = sending
        self._ways = ways
        self._transfer = transfer
        self._mailbox = mailbox
        self._reporter = reporter
        self._metrics = metrics
        self._clock = clock
        self._folds = Folds(None, mailbox.wake) if folds is None else folds
        self._commands = PrefillCommands(
            sending,
            callers=self.callers,
            early=self.early,
            ways=ways,
            bounds=bounds,
            folds=self._folds,
            reporter=reporter,
            clock=clock,
        )
        self._computing = Prefilling(
            sending,
            stepper,
            chunk_tokens,
            scored_tokens,
            reporter=reporter,
            metrics=metrics,
            clock=clock,
        )
        self._pushes = Pushes(
            sending,
            transfer,
            window_bytes,
            checksum,
            reporter=reporter,
            metrics=metrics,
            clock=clock,
        )
        self._connecting: list[Answer] = []
        """To whoever asked for the turn's connections."""
        self._closers: dict[RoomId, set[asyncio.Future[None]]] = {}
        """Who waits for the proof that a room is quiet."""
        self._turns = 0
        self._looks = 0
        """Turns without a pause, from here on."""
        self._held_back = False
        """Nothing is posted in this turn. Never twice in a row, however fast steps are."""

    # ---- what the handlers of the leader call

    @property
    def draining(self) -> bool:
        return self._sending.draining

    def quiet(self, room: RoomId) -> asyncio.Future[None]:
        """Of a room that was closed: done when it is proven that nothing is or will be written for it
        (`ack-is-proof`), however long that takes. To be cancelled by whoever waits no longer."""
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if room in self.roster:
            closers = self._closers.setdefault(room, set())
            closers.add(closed)
            closed.add_done_callback(closers.discard)
        else:
            closed.set_result(None)
        return closed

    def names_of(self, room: RoomId) -> abc.Mapping[str, str]:
        """What a room's request is known by; nothing once it is retired."""
        return self.roster.get(room).request.names if room in self.roster else {}

    def break_off(self, cause: Cause) -> None:
        """This worker ends here and now, in the middle of a turn it may be: tell whoever was not told how its
        room ended, with what ended it before if anything did (`first-cause-wins`). What is sealed is handed
        over. Nothing is given back: all that is held ends with the process."""
        for room in self.roster:
            room.conclude(None if room.phase is Phase.SUCCESS else room.cause or cause)

    def census(self) -> workers_pb2.WorkerCensus:
        """What is held right now, for people to look at."""
        rooms, holdings = self.roster.census(), self._sending.holdings
        return census_to_wire(self._queues(rooms), rooms, holdings, self._turns, self._computing.tokens)

    # ---- Work

    def take_commands(self) -> bytes:
        return self._mailbox.take()

    def apply(self, commands: bytes) -> None:
        for command in group_pb2.Commands.FromString(commands).commands:
            problem: Exception | None = None
            try:
                self._commands.apply(command)
            except (Refusal, PeerFault, Truncated, LayoutMismatch) as error:
                problem = error
            self._carry_out()
            if command.WhichOneof("what") == "connect":
                self._connecting.append(self._mailbox.hold())
                self._sending.connection(problem)
            else:
                self._mailbox.answer(problem)

    def see(self) -> bool:
        news = self._computing.see()
        self._carry_out()
        self._held_back = news and not self._held_back
        news |= self._folds.see()
        self._transfer.notices()
        # Posting may copy: first tokens leave before their pages do, and the next step starts.
        if not self._held_back and self._pushes.look(beside=not self._computing.free):
            news, self._looks = True, LOOKS_MAX
        news |= self._pushes.drain()
        self._carry_out()
        return news

    def capacity(self) -> Capacity:
        return self._sending.capacity()

    def may_compute(self) -> bool:
        return self._computing.free

    def may_leave(self) -> bool:
        return self._sending.may_leave() and self._mailbox.empty

    def connects(self) -> int:
        return self._sending.connects()

    def agreed(self, connects: int) -> None:
        for answer, problem in zip(self._connecting, self._sending.agreed(connects), strict=True):
            answer(problem)
        self._connecting.clear()

    def told(self) -> bytes | None:
        return None

    def hear(self, told: abc.Sequence[bytes]) -> None:  # noqa: ARG002
        raise AssertionError("the ranks of a prefill worker tell each other nothing")

    def voted(self, room: PrefillRoom, wish: Vote, now_ms: int) -> None:
        if room.voted != (room.phase, wish):
            room.voted = (room.phase, wish)
            self._reporter.seen(room.id, Moment.VOTED, wish_told(room, wish, now_ms))

    def perform(self, room: PrefillRoom, effect: Effect | SenderEffect) -> None:
        self._sending.perform(room, effect, self._clock.now_ms())
        self._carry_out()

    def compute(self) -> bool:
        self._computing.start()
        return False

    def record(self, agreement_s: float) -> None:
        census, holdings = self.roster.census(), self._sending.holdings
        self._metrics.worker.record_turn(agreement_s, self._reporter.dropped)
        self._metrics.worker.record_rooms(census, self.roster.dropped.total())
        self._metrics.worker.record_memory(holdings.pages.census(), holdings.slots.census())
        self._metrics.record_queues(self._queues(census))
        self._turns += 1

    async def rest(self) -> bool:
        if self._looks and self._computing.free and self._under_way():
            self._looks -= 1
            await asyncio.sleep(0)
            return self._mailbox.news.is_set()
        return await self._mailbox.rest(self._rest_s())

    async def pause(self, most_s: float) -> None:
        await self._mailbox.rest(most_s)

    # ---- what the hand-over asks of the world

    def _carry_out(self) -> None:
        """All of it, and what that leads to."""
        while requests := self._sending.take_requests():
            for request in requests:
                self._do(request)

    def _do(self, request: SenderRequest) -> None:
        match request:
            case Report(room, moment, detail, of_rank):
                tell = self._reporter.seen if of_rank else self._reporter.note
                tell(room, moment, detail)
            case SendPages(room, tokens, complete):
                self.roster.get(room).push.ready(tokens, complete=complete)
            case BeginWrites(room, slot):
                held = self.roster.get(room)
                self._metrics.worker.reused(held.cached, held.request.prefill_tokens)
                self._pushes.begin(held, slot)
            case SendRecord(room, record):
                held = self.roster.get(room)
                held.push.tell(record, held.pages_checksum)
            case SendSeal(room):
                held = self.roster.get(room)
                held.push.seal()
                self._pushes.look_at(held, beside=not self._computing.free)
            case Outcome(room, cause):
                self._conclude(self.roster.get(room), cause)
            case Retired(room, _, phase_ms):
                self._folds.forget(room)
                for closed in list(self._closers.pop(room, ())):
                    if not closed.done():
                        closed.set_result(None)
                self._metrics.worker.room_retired(phase_ms)
                self._reporter.retired(room)
            case Forget(peer):
                self._ways.forget(peer, gone=True)
                self.receivers.forget(peer)
            case _:
                assert_never(request)

    def _conclude(self, room: PrefillRoom, cause: Cause | None) -> None:
        room.conclude(cause)
        if cause is not None:
            self._pushes.give_up(room)
            self._metrics.worker.room_failed(cause)
            self._reporter.failed(room.id, cause)

    # ---- small things

    def _queues(self, census: abc.Mapping[Phase, int]) -> dict[RoomQueue, int]:
        waiting = sum(room.computable for room in self.roster)
        return {
            RoomQueue.BOOTSTRAP: census[Phase.BOOTSTRAPPING],
            RoomQueue.WAITING: census[Phase.WAITING_FOR_INPUT] + waiting,
            RoomQueue.INFLIGHT: census[Phase.TRANSFERRING] + census[Phase.SEALING] - waiting,
        }

    def _under_way(self) -> bool:
        return any(room.under_way for room in self.roster if room.phase is not Phase.FAILED)

    def _rest_s(self) -> float:
        if self._under_way():
            return POLL_S
        now_ms = self._clock.now_ms()
        waits = [room.deadline_ms - now_ms for room in self.roster if room.phase is not Phase.FAILED]
        most_s = DRAIN_S if any(room.unproven for room in self.roster) else HEARTBEAT_S
        return min([most_s, *(max(wait, 1) / 1000 for wait in waits)])
