"""Work of a decode rank in each turn of its worker's loop.

`baton.handover.receiving_side` decides. This module carries the decisions out: it calls peers, callers, the
engine and the transfer, and updates timelines and metrics. The queue of a room follows from its phase and its
order. There are no lists besides the roster that could contradict it.
"""

import asyncio
from collections import abc
from typing import assert_never

from baton.decode.batch import how_many
from baton.decode.decode_commands import DecodeCommands
from baton.decode.decode_prompt_budget import DecodePromptBudget
from baton.decode.decode_room import DecodeRoom
from baton.decode.decode_scheduler import DecodeScheduler
from baton.decode.draft_scheduler import DraftScheduler
from baton.decode.landing_polls import poll_s
from baton.decode.metrics import DecodeMetrics
from baton.decode.page_check import PageCheck
from baton.decode.prefill_peers import Peers, endpoint_to_wire
from baton.decode.prompt_claims import PromptClaims
from baton.handover.receiving_side import NEAR_S, ReceivingSide
from baton.handover.requests import (
    ClaimRoom,
    Close,
    Connect,
    Forget,
    Grant,
    Join,
    ReceiverRequest,
    Retired,
    SumPages,
)
from baton.ids import Opener, RoomId
from baton.rooms.deadlines import Deadlines
from baton.rooms.evidence import Connected
from baton.rooms.phases import Phase
from baton.rooms.queues import RoomQueue
from baton.rooms.roster import Roster
from baton.rooms.worker_load import WorkerLoad
from baton.runtime.errors import MemoryNotMoved
from baton.runtime.host_memory import CannotMove
from baton.runtime.logging import Log
from baton.transfer.transfer_protocol import TransferError
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.load_messages import adoption_key
from baton.worker.assembly import RankPorts
from baton.worker.polling import deadline_s
from baton.worker.rank_work import RankWork

log = Log(__name__)


class DecodeWork(RankWork[inference_pb2.StreamRoomReply, ReceiverRequest]):
    """Work of one decode rank in each turn. It implements `baton.worker.turn_loop.Work`."""

    roster: Roster[DecodeRoom]
    scheduler: DecodeScheduler
    _metrics: DecodeMetrics

    def __init__(
        self,
        ports: RankPorts,
        deadlines: Deadlines,
        *,
        peers: Peers,
        metrics: DecodeMetrics,
        max_running: int,
        drafting: DraftScheduler | None = None,
        local_gap_ms: int = 0,
        near_s: float = NEAR_S,
    ) -> None:
        """Make the decode side of a rank from its ports.

        `max_running`: most sequences of a step. `drafting`: None for no drafts. `local_gap_ms`: longest time
        in milliseconds for which a part of a prompt, computed here, may delay running sequences. With 0 this
        worker computes prompts only if there is no prefill worker. `near_s`: seconds for which a seal is
        polled without a pause, once its record has arrived.
        """
        memory = ports.memory
        receiving = ReceivingSide(
            DecodeRoom,
            memory.room_limit,
            memory.holdings,
            ports.layout,
            deadlines,
            exposure=ports.exposure.id,
            ranks=len(ports.layouts),
            vocabulary=ports.bounds.vocabulary,
            checksum=ports.checksum,
            near_s=near_s,
            running_max=max_running,
        )
        self._drafting = DraftScheduler() if drafting is None else drafting
        computing = DecodeScheduler(receiving, ports, metrics, max_running, self._drafting, local_gap_ms)
        super().__init__(receiving, ports, metrics, computing)
        self.endpoints: abc.Sequence[inference_pb2.Endpoint] = ()
        """Present transfer endpoints of all ranks of this worker, in rank order. Empty until every rank has
        sent its own."""
        self.receiving = receiving
        self.peers = peers
        self.max_running = max_running
        self._landing = PageCheck(receiving, ports.step_thread)
        self._commands = DecodeCommands(receiving, self.callers, ports, self._drafting.cost)
        self.prompt_claims = PromptClaims(receiving, computing.pace, max_running, ports.clock)
        self.prompt_budget = DecodePromptBudget(receiving.roster, computing.pace)
        """Limit that this decode side sets on prefill steps, in a process in which both sides share one
        thread."""
        self._endpoint_due = True
        """Whether this rank still has to send its present transfer endpoint to the other ranks."""

    # ---- Work

    def take_commands(self) -> bytes:
        if self.receiving.revocation_due(self.ports.clock.now_ms(), shut_out=self.peers.shut_out):
            self.ports.mailbox.put(group_pb2.Command(revoke=True))
        for decided in self.prompt_claims.due():
            self.ports.mailbox.put(group_pb2.Command(compute_here=decided))
        return super().take_commands()

    def observe(self) -> bool:
        self.scheduler.observe()
        news = self._landing.take() | self.ports.grammar_states.observe()
        self.ports.exposure.transfer.progress()
        for room in self.receiving.touched():
            news |= self.receiving.poll(room)
        self._carry_out()
        self._landing.start(batch_waits=any(room.runs or room.computable for room in self.roster))
        return news

    def on_agreement(self, connects: int) -> None:
        """Send the grants that were made in the turn before, because all ranks have reached this turn.

        All ranks have carried out the requests of that turn. So memory that the leader reserved and exposed
        is reserved and exposed on every rank. `connects` is 0: no worker connects to a decode worker.
        """
        if connects:
            raise AssertionError(f"{connects} connections to a decode worker")
        self.receiving.agreed()
        self._carry_out()

    def gather_payload(self) -> bytes | None:
        """Return this rank's present transfer endpoint, serialised. None if the other ranks already have
        it."""
        if not self._endpoint_due:
            return None
        self._endpoint_due = False
        return endpoint_to_wire(self.ports.exposure.endpoint()).SerializeToString()

    def on_gathered(self, payloads: abc.Sequence[bytes]) -> None:
        self.endpoints = [inference_pb2.Endpoint.FromString(each) for each in payloads]
        self.peers.exposed_anew(self.endpoints)

    def _load(self, opener: Opener | None) -> WorkerLoad:
        return self.receiving.load(self.max_running, opener)

    def compute(self) -> bool:
        if self.receiving.revoking:
            self._take_memory_back()
            return True
        started, retracts = self.scheduler.start()
        if started:
            self._landing.stepped()
        self._carry_out()
        return retracts

    def _queues(self, census: abc.Mapping[Phase, int]) -> dict[RoomQueue, int]:
        count = how_many(self.roster)
        return {
            RoomQueue.PREALLOC: census[Phase.BOOTSTRAPPING] + census[Phase.WAITING_FOR_INPUT],
            RoomQueue.TRANSFER: census[Phase.TRANSFERRING] + census[Phase.COMPUTING],
            RoomQueue.WAITING: max(count - self.max_running, 0),
            RoomQueue.RUNNING: min(count, self.max_running),
        }

    def record(self, agreement_s: float) -> None:
        super().record(agreement_s)
        self._metrics.record_drafts(self._drafting.census())

    async def rest(self) -> bool:
        """Wait until a turn may have something to do. Return whether an event arrived.

        NIXL makes progress only when called. While data may land, this function calls it, and a turn follows
        when a seal has arrived. With several ranks, a turn follows each poll, because ranks look for data in
        turns only. Polls have no pause while a record shows that its seal is near.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + deadline_s(self.roster, self.ports.clock.now_ms())
        while (left_s := ends - loop.time()) > 0:
            free = self.scheduler.free
            if free and self.receiving.near(loop.time()):
                await asyncio.sleep(0)
            else:
                await self.ports.mailbox.rest(min(poll_s(self.roster, engine_free=free), left_s))
            if self.ports.mailbox.news.is_set() or len(self.endpoints) > 1:
                break
            self.ports.exposure.transfer.progress()
            if self.receiving.touched():
                break
        return self.ports.mailbox.news.is_set()

    # ---- requests of the hand-over core

    def _do(self, request: ReceiverRequest) -> None:
        match request:
            case Connect():
                if self.peers.connect(self.roster.get(request.room).prefill, request.room):
                    self.receiving.note(request.room, Connected())
            case Grant():
                room = self.roster.get(request.room)
                self._metrics.reused(request.prefix_tokens, room.request.prefill_tokens)
                self.peers.grant(room.prefill, request)
            case Join():
                room = self.roster.get(request.room)
                if room.local:
                    self._metrics.claimed()
                else:
                    self._metrics.admitted(sum(room.phase_ms.values()) / 1000)
                self.scheduler.join(room)
            case ClaimRoom():
                self.peers.grant(self.roster.get(request.room).prefill, request)
            case SumPages():
                self._landing.begin(self.roster.get(request.room), request.first_token)
            case Close():
                room = self.roster.get(request.room)
                self.peers.close(room.prefill, request.room, request.generation)
                if request.doubtful:
                    self.peers.doubt(request.peer)
            case Forget():
                self.peers.forget(request.peer)
            case _:
                assert_never(request)

    def _orphaned(self, room: RoomId) -> None:
        self._orphan_keys[room] = adoption_key(self.roster.get(room).request)
        self._renew_leases()

    def _retired(self, retired: Retired, detail: str = "") -> None:
        self.peers.over(retired.room)
        super()._retired(retired, detail if retired.proof is None else retired.proof.value)

    def _take_memory_back(self) -> None:
        """Move the exposed memory out of reach of all senders. Raises MemoryNotMoved, after which this worker
        has to end."""
        try:
            self.ports.exposure.revoke()
        except (CannotMove, TransferError) as error:
            raise MemoryNotMoved(f"exposed memory cannot be taken back from senders: {error}") from error
        self.receiving.revoked(self.ports.exposure.id, self.ports.memory.slots.view)
        self._endpoint_due = True
        self._metrics.revoked()
        log.warning("exposed memory taken back", exposure=self.ports.exposure.id)
