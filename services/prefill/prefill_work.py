"""Work of a prefill rank in each turn of its worker's loop.

Queues, in the terms of SGLang: *bootstrap* (no destination yet), *waiting* (destination known, not computed),
*inflight* (computed, not all written). The queue of a room follows from its phase and from how much of its
prompt is computed. There are no lists besides the roster that could contradict it.
"""

import asyncio
from collections import abc
from typing import Final, assert_never

from baton.handover.early_grants import EarlyGrants
from baton.handover.requests import (
    BeginWrites,
    Forget,
    Retired,
    SenderRequest,
    SendPages,
    SendRecord,
    SendSeal,
)
from baton.handover.sending_side import SendingSide
from baton.ids import Opener, RoomId
from baton.prefill.metrics import PrefillMetrics
from baton.prefill.prefill_commands import PrefillCommands
from baton.prefill.prefill_room import PrefillRoom
from baton.prefill.prefill_scheduler import PrefillScheduler
from baton.prefill.receivers import Receivers
from baton.prefill.routes import Routes
from baton.prefill.transfer_scheduler import TransferScheduler
from baton.rooms.deadlines import Deadlines
from baton.rooms.errors import Cause
from baton.rooms.phases import Phase
from baton.rooms.queues import RoomQueue
from baton.rooms.roster import Roster
from baton.rooms.worker_load import WorkerLoad
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.worker.assembly import RankPorts
from baton.worker.mailbox import Answer
from baton.worker.polling import DRAIN_S, HEARTBEAT_S, POLL_S, deadline_s
from baton.worker.prompt_budget import FULL_BUDGET, PromptBudget
from baton.worker.rank_work import RankWork

EARLY_PER_PLACE: Final = 4
"""Most grants of one decode worker that may wait for their rooms, as a multiple of this worker's largest
number of rooms.

A decode worker grants no more rooms than both workers can have, and some of them may already be over on this
worker.
"""
SCORED_TOKENS: Final = 64
"""Most prompt tokens whose log-probabilities one step computes, if the engine has no limit of its own."""
LOOKS_MAX: Final = 16
"""Number of turns without a pause between them after a write has progressed, while no step runs. Most writes
end sooner than the shortest pause."""


class PrefillWork(RankWork[inference_pb2.RunRoomReply, SenderRequest]):
    """Work of one prefill rank in each turn. It implements `baton.worker.turn_loop.Work`."""

    roster: Roster[PrefillRoom]
    scheduler: PrefillScheduler
    _metrics: PrefillMetrics

    def __init__(
        self,
        ports: RankPorts,
        deadlines: Deadlines,
        *,
        metrics: PrefillMetrics,
        chunk_tokens: int,
        window_bytes: int,
        scored_tokens: int = SCORED_TOKENS,
        prompt_budget: PromptBudget = FULL_BUDGET,
    ) -> None:
        """Make the prefill side of a rank from its ports.

        `chunk_tokens`: most prompt tokens that a step computes. `window_bytes`: most bytes of one write to a
        peer. `scored_tokens`: most of a step's tokens that score a prompt. `prompt_budget`: limit set by a
        decode side whose steps run on the same thread.
        """
        routes = Routes(ports.exposure.transfer, ports.layouts, ports.rank, ports.checksum)
        memory = ports.memory
        sending = SendingSide(
            PrefillRoom, memory.room_limit, memory.holdings, ports.layout, deadlines, elected=routes.elected
        )
        computing = PrefillScheduler(sending, ports, metrics, chunk_tokens, scored_tokens, prompt_budget)
        super().__init__(sending, ports, metrics, computing)
        self.receivers = Receivers()
        self.early: EarlyGrants[inference_pb2.GrantRequest] = EarlyGrants(EARLY_PER_PLACE * self.roster.size)
        self.sending = sending
        self.routes = routes
        self._commands = PrefillCommands(sending, self.callers, ports, computing.cost, self.early, routes)
        self._pushes = TransferScheduler(sending, ports, metrics, window_bytes)
        self._connecting: list[Answer] = []
        """Functions that send the answers to this turn's connects, in the order of the connects."""
        self.closers: dict[RoomId, set[asyncio.Future[None]]] = {}
        """Futures of handlers that answer a close when the room's writes have ended, by room."""
        self._looks = 0
        """Number of turns, of LOOKS_MAX, that still follow without a pause."""
        self._is_delayed = False
        """Whether this turn starts no writes, so that first tokens and the next step come first. Two
        successive turns never both start none."""

    # ---- what the handlers of the leader call

    def quiet(self, room: RoomId) -> asyncio.Future[None]:
        """Return a future that is done when a closed room has no write under way and can start none
        (`ack-is-proof`).

        This may take arbitrarily long. The caller cancels the future if it waits no longer.
        """
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if room in self.roster:
            closers = self.closers.setdefault(room, set())
            closers.add(closed)
            closed.add_done_callback(closers.discard)
        else:
            closed.set_result(None)
        return closed

    # ---- Work

    def _answer(self, command: group_pb2.Command, problem: Exception | None) -> None:
        if command.WhichOneof("what") == "connect":
            self._connecting.append(self.ports.mailbox.hold())
            self.sending.connection(problem)
        else:
            super()._answer(command, problem)

    def observe(self) -> bool:
        news = self.scheduler.observe()
        self._carry_out()
        self._is_delayed = news and not self._is_delayed
        news |= self.ports.grammar_states.observe()
        self.ports.exposure.transfer.progress()
        # Posting may copy: first tokens leave before their pages do, and the next step starts.
        if not self._is_delayed and self._pushes.poll(beside=not self.scheduler.free):
            news, self._looks = True, LOOKS_MAX
        news |= self._pushes.drain()
        self._carry_out()
        return news

    def connects(self) -> int:
        return self.sending.connects()

    def on_agreement(self, connects: int) -> None:
        for answer, problem in zip(self._connecting, self.sending.agreed(connects), strict=True):
            answer(problem)
        self._connecting.clear()

    def compute(self) -> bool:
        self.scheduler.start()
        return False

    def _load(self, opener: Opener | None) -> WorkerLoad:
        computing = self.scheduler
        tokens_per_s = computing.rate.per_s(self.ports.clock.now_ms())
        return self.sending.load(tokens_per_s, computing.cost.agreed.score_price, opener)

    def _queues(self, census: abc.Mapping[Phase, int]) -> dict[RoomQueue, int]:
        waiting = sum(room.computable for room in self.roster)
        return {
            RoomQueue.BOOTSTRAP: census[Phase.BOOTSTRAPPING],
            RoomQueue.WAITING: census[Phase.WAITING_FOR_INPUT] + waiting,
            RoomQueue.INFLIGHT: census[Phase.TRANSFERRING] + census[Phase.SEALING] - waiting,
        }

    async def rest(self) -> bool:
        under_way = any(room.under_way for room in self.roster if room.phase is not Phase.FAILED)
        if under_way and self._looks and self.scheduler.free:
            self._looks -= 1
            await asyncio.sleep(0)
            return self.ports.mailbox.news.is_set()
        if under_way:
            return await self.ports.mailbox.rest(POLL_S)
        look_s = DRAIN_S if any(room.unproven for room in self.roster) else HEARTBEAT_S
        late_s = deadline_s(self.roster, self.ports.clock.now_ms())
        return await self.ports.mailbox.rest(min(look_s, late_s))

    # ---- requests of the hand-over core

    def _do(self, request: SenderRequest) -> None:
        match request:
            case SendPages():
                self.roster.get(request.room).push.ready(request.tokens, complete=request.complete)
            case BeginWrites():
                room = self.roster.get(request.room)
                self._metrics.reused(room.cached, room.request.prefill_tokens)
                self._pushes.begin(room, request.slot)
            case SendRecord():
                room = self.roster.get(request.room)
                room.push.add_record(request.record, room.pages_checksum)
            case SendSeal():
                room = self.roster.get(request.room)
                room.push.seal()
                self._pushes.poll_room(room, beside=not self.scheduler.free)
            case Forget():
                self.routes.forget(request.peer, gone=True)
                self.receivers.forget(request.peer)
            case _:
                assert_never(request)

    def _conclude(self, room: PrefillRoom, cause: Cause | None) -> None:
        if cause is not None:
            self._pushes.give_up(room)
        super()._conclude(room, cause)

    def _retired(self, retired: Retired, detail: str = "") -> None:
        for closed in list(self.closers.pop(retired.room, ())):
            if not closed.done():
                closed.set_result(None)
        super()._retired(retired, detail)
