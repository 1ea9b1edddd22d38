"""What does a decode rank see, do and compute in a turn?

`services.handover.receiving` decides; here is the world that it asks: peers, callers, the engine, the
transfer, timelines and metrics.

Which queue a room stands in follows from the rooms' phases and their order: there are no lists beside the
roster that could disagree with it.
"""

import asyncio
from collections import abc
from typing import assert_never

from services.decode.batch import how_many
from services.decode.commands import DecodeCommands
from services.decode.computing import Decoding
from services.decode.handover_client import Peers, endpoint_to_wire
from services.decode.landing import LandingCheck
from services.decode.metrics import DecodeMetrics
from services.decode.rest import deadline_s, look_s
from services.decode.room import DecodeRoom
from services.handover.receiving import Receiving
from services.handover.requests import (
    Close,
    Connect,
    Forget,
    Grant,
    Join,
    Outcome,
    ReceiverRequest,
    Report,
    Retired,
    SumPages,
)
from services.ids import Incarnation, RoomId
from services.rooms.errors import Cause, PeerFault, Refusal
from services.rooms.evidence import Connected
from services.rooms.phases import Effect, Phase, ReceiverEffect, Vote
from services.rooms.queues import RoomQueue
from services.rooms.roster import Capacity
from services.rooms.timeline import Moment
from services.runtime.clock import Clock
from services.runtime.errors import MemoryKept
from services.runtime.host_memory import CannotMove, HostMemory
from services.runtime.logging import Log
from services.transfer.exposure import Exposure
from services.transfer.interface import TransferError
from services.wire.baton.v1 import group_pb2, inference_pb2, workers_pb2
from services.wire.census import census_to_wire
from services.wire.model_bounds import ModelBounds
from services.worker.callers import Callers
from services.worker.folds import Folds
from services.worker.mailbox import Mailbox
from services.worker.reporter import Reporter, wish_told
from services.worker.stepper import Stepper

log = Log(__name__)


class DecodeWork:
    """The decode side of `services.worker.turns.Work`."""

    def __init__(
        self,
        receiving: Receiving[DecodeRoom],
        *,
        incarnation: Incarnation,
        bounds: ModelBounds,
        stepper: Stepper,
        exposure: Exposure,
        slots: HostMemory,
        peers: Peers,
        mailbox: Mailbox,
        reporter: Reporter,
        metrics: DecodeMetrics,
        clock: Clock,
        max_running: int,
        folds: Folds | None = None,
    ) -> None:
        """`slots`: the memory of those that `receiving` hands out. `folds`: of the rank that draws."""
        self.roster = receiving.roster
        self.callers: Callers[inference_pb2.StreamRoomReply] = Callers(mailbox, self.roster)
        self.endpoints: abc.Sequence[inference_pb2.Endpoint] = ()
        """Of every rank's memory, in rank order, once they have told."""
        self._receiving = receiving
        self._incarnation = incarnation
        self._exposure = exposure
        self._slots = slots
        self._peers = peers
        self._mailbox = mailbox
        self._reporter = reporter
        self._metrics = metrics
        self._clock = clock
        self._max_running = max_running
        self._folds = Folds(None, mailbox.wake) if folds is None else folds
        self._computing = Decoding(receiving, stepper, max_running, metrics=metrics, clock=clock)
        self._landing = LandingCheck(receiving, stepper)
        self._commands = DecodeCommands(
            receiving,
            callers=self.callers,
            bounds=bounds,
            folds=self._folds,
            reporter=reporter,
            clock=clock,
        )
        self._untold = True
        """The other ranks do not know yet where this one's memory is."""
        self._turns = 0

    # ---- what the leader's process calls

    @property
    def draining(self) -> bool:
        return self._receiving.draining

    def names_of(self, room: RoomId) -> abc.Mapping[str, str]:
        """What a room's request is known by; nothing once it is retired."""
        return self.roster.get(room).request.names if room in self.roster else {}

    def break_off(self, cause: Cause) -> None:
        """This worker ends here and now, in the middle of a turn it may be: tell whoever was not told how its
        room ended, with what ended it before if anything did (`first-cause-wins`). Nothing is given back: all
        that is held ends with the process."""
        for room in self.roster:
            room.conclude(None if room.finished else room.cause or cause)

    def census(self) -> workers_pb2.WorkerCensus:
        """What is held right now, for people to look at."""
        rooms, holdings = self.roster.census(), self._receiving.holdings
        return census_to_wire(self._queues(rooms), rooms, holdings, self._turns, self._computing.tokens)

    # ---- Work

    def take_commands(self) -> bytes:
        if self._receiving.revocation_due(self._clock.now_ms(), shut_out=self._peers.shut_out):
            self._mailbox.put(group_pb2.Command(revoke=True))
        return self._mailbox.take()

    def apply(self, commands: bytes) -> None:
        for command in group_pb2.Commands.FromString(commands).commands:
            refused: Exception | None = None
            try:
                self._commands.apply(command)
            except (Refusal, PeerFault) as error:
                refused = error
            self._carry_out()
            self._mailbox.answer(refused)

    def see(self) -> bool:
        self._computing.see()
        news = self._landing.take() | self._folds.see()
        self._exposure.transfer.notices()
        for room in self._receiving.touched():
            news |= self._receiving.look(room)
        self._carry_out()
        self._landing.start(batch_waits=how_many(self.roster) > 0)
        return news

    def capacity(self) -> Capacity:
        return self._receiving.capacity()

    def may_compute(self) -> bool:
        return self._computing.free

    def may_leave(self) -> bool:
        return self._receiving.may_leave() and self._mailbox.empty

    def connects(self) -> int:
        return 0

    def agreed(self, connects: int) -> None:
        """Nobody connects to a decode worker. But where every rank agrees anew, every rank has done what the
        turn before asked of it: what the leader reserved and exposed then, the others have, too."""
        if connects:
            raise AssertionError(f"{connects} connections to a decode worker")
        self._receiving.agreed()
        self._carry_out()

    def told(self) -> bytes | None:
        """Where this rank's memory is, for the others, if they do not know yet."""
        if not self._untold:
            return None
        self._untold = False
        return endpoint_to_wire(self._exposure.endpoint()).SerializeToString()

    def hear(self, told: abc.Sequence[bytes]) -> None:
        self.endpoints = [inference_pb2.Endpoint.FromString(each) for each in told]
        self._peers.exposed_anew(self.endpoints)

    def voted(self, room: DecodeRoom, wish: Vote, now_ms: int) -> None:
        if room.voted != (room.phase, wish):
            room.voted = (room.phase, wish)
            self._reporter.seen(room.id, Moment.VOTED, wish_told(room, wish, now_ms))

    def perform(self, room: DecodeRoom, effect: Effect | ReceiverEffect) -> None:
        self._receiving.perform(room, effect, self._clock.now_ms())
        self._carry_out()

    def compute(self) -> bool:
        if self._receiving.revoking:
            self._take_memory_back()
            return True
        if self._computing.start():
            self._landing.stepped()
        return False

    def record(self, agreement_s: float) -> None:
        census, holdings = self.roster.census(), self._receiving.holdings
        self._metrics.worker.record_turn(agreement_s, self._reporter.dropped)
        self._metrics.worker.record_rooms(census, self.roster.dropped.total())
        self._metrics.worker.record_memory(holdings.pages.census(), holdings.slots.census())
        self._metrics.record_queues(self._queues(census), self._max_running)
        self._turns += 1

    def _queues(self, census: abc.Mapping[Phase, int]) -> dict[RoomQueue, int]:
        count = how_many(self.roster)
        return {
            RoomQueue.PREALLOC: census[Phase.BOOTSTRAPPING] + census[Phase.WAITING_FOR_INPUT],
            RoomQueue.TRANSFER: census[Phase.TRANSFERRING],
            RoomQueue.WAITING: max(count - self._max_running, 0),
            RoomQueue.RUNNING: min(count, self._max_running),
        }

    async def rest(self) -> bool:
        """Until a turn may have something to do. NIXL is driven by its callers: while something may land, it
        is driven here, and a turn is taken when a seal is there. With others in the group, every look is a
        turn, since they look in turns alone. Where a record says that its seal is near, there is no pause."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + deadline_s(self.roster, self._clock.now_ms())
        while (left_s := ends - loop.time()) > 0:
            free = self._computing.free
            if free and self._receiving.near(loop.time()):
                await asyncio.sleep(0)
            else:
                await self._mailbox.rest(min(look_s(self.roster, engine_free=free), left_s))
            if self._mailbox.news.is_set() or len(self.endpoints) > 1:
                break
            self._exposure.transfer.notices()
            if self._receiving.touched():
                break
        return self._mailbox.news.is_set()

    async def pause(self, most_s: float) -> None:
        await self._mailbox.rest(most_s)

    # ---- what the hand-over asks of the world

    def _carry_out(self) -> None:
        """All of it, and what that leads to."""
        while requests := self._receiving.take_requests():
            for request in requests:
                self._do(request)

    def _do(self, request: ReceiverRequest) -> None:
        match request:
            case Report(room, moment, detail, of_rank):
                tell = self._reporter.seen if of_rank else self._reporter.note
                tell(room, moment, detail)
            case Connect(room):
                if self._peers.connect(self.roster.get(room).prefill, room):
                    self._receiving.note(room, Connected())
            case Grant(room):
                self._grant(self.roster.get(room), request)
            case SumPages(room, first_token):
                self._landing.begin(self.roster.get(room), first_token)
            case Join(room):
                held = self.roster.get(room)
                self._metrics.admitted(sum(held.phase_ms.values()) / 1000)
                self._computing.join(held)
            case Outcome(room, cause):
                self._conclude(self.roster.get(room), cause)
            case Close(room, peer, generation, doubtful):
                self._peers.close(self.roster.get(room).prefill, room, generation)
                if doubtful:
                    self._peers.doubt(peer)
            case Retired(room, proof, phase_ms):
                self._peers.over(room)
                self._folds.forget(room)
                self._metrics.worker.room_retired(phase_ms)
                self._reporter.retired(room, "" if proof is None else proof.value)
            case Forget(peer):
                self._peers.forget(peer)
                self._exposure.transfer.disconnect(peer)
            case _:
                assert_never(request)

    def _grant(self, room: DecodeRoom, grant: Grant) -> None:
        self._metrics.worker.reused(grant.prefix_tokens, room.request.prefill_tokens)
        request = inference_pb2.GrantRequest(
            room=room.id,
            receiver=self._incarnation,
            generation=grant.generation,
            pages=grant.pages,
            slot=grant.slot,
            exposure=grant.exposure,
            prefix_tokens=grant.prefix_tokens,
        )
        self._peers.grant(room.prefill, request)

    def _conclude(self, room: DecodeRoom, cause: Cause | None) -> None:
        room.conclude(cause)
        if cause is not None:
            self._metrics.worker.room_failed(cause)
            self._reporter.failed(room.id, cause)

    def _take_memory_back(self) -> None:
        """What senders know of leads nowhere from now on. Raises MemoryKept: this worker has to end."""
        try:
            self._exposure.revoke()
        except (CannotMove, TransferError) as error:
            raise MemoryKept(f"exposed memory cannot be taken back from senders: {error}") from error
        self._receiving.revoked(self._exposure.id, self._slots.view)
        self._untold = True
        self._metrics.revoked()
        log.warning("exposed memory taken back", exposure=self._exposure.id)
