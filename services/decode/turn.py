"""What does a decode rank see, do and compute in a turn?

Queues, in the field's words: *prealloc* (no pages yet), *transfer* (pages granted, not landed on every
rank), *waiting* (admitted, no space in the batch) and *running*. They follow from the rooms' phases and
their order; there are no lists beside the roster that could disagree with it.
"""

import asyncio
from collections import abc
from math import inf
from typing import Final

from services.decode.batch import next_batch
from services.decode.job import Job
from services.decode.landing import LandingCheck
from services.decode.metrics import DecodeMetrics
from services.decode.peers import Peers, endpoint_to_wire
from services.engine.engine import PageSum, Row
from services.engine.stepper import StepFailed, Stepper
from services.pages.checksum import KvChecksum
from services.pages.errors import RecordCorrupt, RecordForeign
from services.pages.holdings import Holdings
from services.pages.layout import KvLayout
from services.pages.record import MetadataRecord, read_slot, touched
from services.rooms.deadlines import Deadlines
from services.rooms.errors import Cause, PeerFault, Reason, Refusal
from services.rooms.evidence import Connected, Failed, Fenced, Finished, Landed, Proof, Sealed
from services.rooms.ids import Generation, Incarnation, RoomId
from services.rooms.phases import Effect, Phase, Vote
from services.rooms.quarantine import in_quarantine, revocation_due
from services.rooms.receiver import Receiver
from services.rooms.request import Token
from services.rooms.room import Room
from services.rooms.roster import Capacity, Roster
from services.runtime.clock import Clock
from services.runtime.errors import MemoryKept
from services.runtime.host_memory import CannotMove, HostMemory
from services.runtime.logging import Log
from services.transfer.exposure import Exposure
from services.transfer.interface import TransferError
from services.wire.baton.v1 import group_pb2, inference_pb2, rooms_pb2, workers_pb2
from services.wire.callers import Callers
from services.wire.census import census_to_wire
from services.wire.conversions import (
    cause_from_wire,
    check_peer,
    finish_to_wire,
    outcome_to_wire,
    request_from_wire,
    room_from_wire,
    token_to_wire,
)
from services.wire.mailbox import Mailbox
from services.wire.model_bounds import ModelBounds
from services.wire.reporter import Reporter, wish_told

log = Log(__name__)

HEARTBEAT_S: Final = 1.0
POLL_S: Final = 0.001
BESIDE_STEP_S: Final = 0.004
"""How soon to look for what may land while a step computes: nothing is admitted before it ends, each look
takes time from it, and over TCP what is on its way needs to be driven all the same."""
DRAIN_S: Final = 0.01
"""While memory is in quarantine: what its sender posted may end only while its target makes progress."""

CALLERS_OWN: Final = frozenset({Reason.ANSWERED, Reason.CLIENT_GONE, Reason.CANCELLED})
"""Ends that say nothing about the way to the sender."""


class DecodeWork:
    """The decode side of `services.parallel.turns.Work`. Every table is keyed by room and emptied by
    `_retire`."""

    def __init__(
        self,
        *,
        places: int,
        incarnation: Incarnation,
        holdings: Holdings,
        layout: KvLayout,
        bounds: ModelBounds,
        stepper: Stepper,
        exposure: Exposure,
        slots: HostMemory,
        peers: Peers,
        mailbox: Mailbox,
        reporter: Reporter,
        metrics: DecodeMetrics,
        clock: Clock,
        deadlines: Deadlines,
        max_running: int,
        checksum: KvChecksum = KvChecksum.RECORD,
    ) -> None:
        self.roster: Roster[Receiver] = Roster(places)
        self.draining = False
        self._incarnation = incarnation
        self._holdings = holdings
        self._layout = layout
        self._bounds = bounds
        self._stepper = stepper
        self._exposure = exposure
        self._slots = slots
        self._peers = peers
        self._mailbox = mailbox
        self._reporter = reporter
        self._metrics = metrics
        self._clock = clock
        self._deadlines = deadlines
        self._max_running = max_running
        self._checksum = checksum
        self._landing = LandingCheck(stepper, layout)
        self._jobs: dict[RoomId, Job] = {}
        self.callers: Callers[inference_pb2.StreamRoomReply] = Callers(mailbox)
        self._step: list[Job] = []
        self._step_us = 0
        """When it was started."""
        self._turns = 0
        self._drawn = 0
        """Tokens, since start."""
        self._revoking = False
        """Agreed, and to be done in the first turn in which every rank's engine is free."""
        self._revocation_asked = False
        """The leader's: its command is on the way, or being carried out."""
        self._granting: list[tuple[rooms_pb2.Peer, inference_pb2.GrantRequest]] = []
        """Exposed here, and not yet known to be so on every rank."""
        self._untold = True
        """The other ranks do not know yet where this one's memory is."""
        self.endpoints: abc.Sequence[inference_pb2.Endpoint] = ()
        """Of every rank, in rank order, once they have told."""

    # ---- what the leader's process calls

    def names_of(self, room: int) -> abc.Mapping[str, str]:
        """What a room's request is known by; nothing once it is retired."""
        job = self._jobs.get(RoomId(room))
        return {} if job is None else job.request.names

    def break_off(self, cause: Cause) -> None:
        """This worker ends here and now: tell whoever still waits for a room, with what ended it before if
        anything did (`first-cause-wins`). Nothing is given back: all that is held ends with the process."""
        for job in self._jobs.values():
            ended = job.finished or job.receiver.stopping or job.receiver.phase is Phase.FAILED
            if not ended:
                outcome = outcome_to_wire(job.receiver.cause or cause)
                self._reply(job, inference_pb2.StreamRoomReply(outcome=outcome))

    def census(self) -> workers_pb2.WorkerCensus:
        """What is held right now, for people to look at."""
        rooms = self.roster.census()
        return census_to_wire(self._queues(rooms), rooms, self._holdings, self._turns, self._drawn)

    # ---- Work

    def take_commands(self) -> bytes:
        if not self._revocation_asked and self._revocation_due():
            self._revocation_asked = True
            self._mailbox.put(group_pb2.Command(revoke=True))
        return self._mailbox.take()

    def apply(self, commands: bytes) -> None:
        for command in group_pb2.Commands.FromString(commands).commands:
            try:
                self._apply(command)
            except (Refusal, PeerFault) as error:
                self._mailbox.answer(error)
            else:
                self._mailbox.answer(None)

    def see(self) -> bool:
        self._see_step()
        news = self._see_sums()
        self._exposure.transfer.notices()
        for job in self._touched():
            news |= self._see_slot(job)
        self._landing.start(self._jobs.values(), batch_waits=bool(self._unfinished()))
        return news

    def capacity(self) -> Capacity:
        if self._revoking:
            return Capacity(0, 0)  # nothing is exposed that would have to be taken back at once
        holdings = self._holdings
        return Capacity(holdings.available, holdings.slots.free, holdings.prefixes.digest)

    def may_compute(self) -> bool:
        return self._stepper.free

    def may_leave(self) -> bool:
        return self.draining and not self._jobs and self._mailbox.empty

    def connects(self) -> int:
        return 0

    def agreed(self, connects: int) -> None:
        """Nobody connects to a decode worker. But where every rank agrees anew, every rank has done what the
        turn before asked of it: what the leader reserved and exposed then, the others have, too."""
        if connects:
            raise AssertionError(f"{connects} connections to a decode worker")
        self._tell_senders()

    def told(self) -> bytes | None:
        if not self._untold:
            return None
        self._untold = False
        return endpoint_to_wire(self._exposure.endpoint()).SerializeToString()

    def hear(self, told: abc.Sequence[bytes]) -> None:
        self.endpoints = [inference_pb2.Endpoint.FromString(each) for each in told]

    def voted(self, room: Room, wish: Vote, now_ms: int) -> None:
        job = self._jobs[room.id]
        if job.voted != (room.phase, wish):
            job.voted = (room.phase, wish)
            self._reporter.seen(room.id, "voted", wish_told(room, wish, now_ms))

    def perform(self, room: Room, effect: Effect) -> None:
        job = self._jobs[room.id]
        match effect:
            case Effect.QUEUE:
                self._tell(job, "connected")
            case Effect.GRANT:
                self._grant(job)
            case Effect.ADMIT:
                self._admit(job)
            case Effect.STOP:
                self._end_early(job)
            case Effect.FENCE:
                self._fail(job)
            case Effect.RELEASE:
                self._retire(job)
            case Effect.COMPUTE | Effect.SEAL | Effect.REPORT:
                raise AssertionError(f"{effect.value} is not a receiver's")

    def compute(self) -> bool:
        if self._revoking:
            self._take_memory_back()
            return True
        batch = next_batch(self._unfinished(), self._max_running)
        if not batch:
            return False
        for job in batch:
            job.receiver.busy = True
        self._step, self._step_us = batch, self._clock.host_us()
        self._stepper.start(
            [Row(job.sequence, job.position, job.position + 1, job.pages, sample=True) for job in batch]
        )
        self._landing.stepped()
        return False

    def record(self, agreement_s: float) -> None:
        census = self.roster.census()
        self._metrics.worker.record_turn(agreement_s, self._reporter.dropped)
        self._metrics.worker.record_rooms(census, self.roster.dropped.total())
        self._metrics.worker.record_memory(self._holdings.pages.census(), self._holdings.slots.census())
        self._metrics.record_queues(**self._queues(census), most=self._max_running)
        self._turns += 1

    async def rest(self) -> None:
        """Until a turn may have something to do. NIXL is driven by its callers: while something may land, it
        is driven here, and a turn is taken when a seal is there. With others in the group, every look is a
        turn, since they look in turns alone."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._deadline_s()
        while (left_s := ends - loop.time()) > 0:
            await self._mailbox.rest(min(self._look_s(), left_s))
            if self._mailbox.news.is_set() or len(self.endpoints) > 1:
                return
            self._exposure.transfer.notices()
            if self._touched():
                return

    # ---- commands

    def _apply(self, command: group_pb2.Command) -> None:
        match command.WhichOneof("what"):
            case "stream":
                self._open(command.stream)
            case "cancel":
                self._cancel(RoomId(command.cancel.room), cause_from_wire(command.cancel.cause))
            case "connected":
                self._connected(Incarnation(command.connected))
            case "quiet":
                self._quiet(command.quiet)
            case "departed":
                self._depart(Incarnation(command.departed))
            case "revoke":
                self._revoke()
            case "drain":
                self.draining = True
            case other:
                raise PeerFault(f"{other} is not a command for a decode worker")

    def _open(self, wire: inference_pb2.StreamRoomRequest) -> None:
        room, request = room_from_wire(wire.room), request_from_wire(wire.request)
        check_peer(wire.prefill, "prefill")
        self._bounds.check(request)
        needed = self._layout.pages_for(request.tokens_max)
        if needed > len(self._holdings.pages):
            raise Refusal(
                f"request may grow to {request.tokens_max} tokens: the cache of this worker never holds it"
            )
        now_ms = self._clock.now_ms()
        expected = self._layout.pages_for(request.prefill_tokens)

        def make(place: int) -> Receiver:
            peer = Incarnation(wire.prefill.incarnation)
            return Receiver(
                room,
                request.request_id,
                peer,
                place,
                needed,
                self._deadlines,
                now_ms,
                pages_expected=expected,
            )

        receiver = self.roster.open(room, make, now_ms)
        peer = rooms_pb2.Peer()
        peer.CopyFrom(wire.prefill)
        job = Job(receiver, request, peer, self.callers.take(room))
        self._jobs[room] = job
        self._reporter.opened(room, request)
        self._reply(job, inference_pb2.StreamRoomReply(accepted=inference_pb2.Accepted()))
        self._tell(job, "accepted", f"{needed} pages needed")
        if self._peers.connect(peer, room):
            receiver.note(Connected())

    def _cancel(self, room: RoomId, cause: Cause) -> None:
        self.roster.cancel(room, cause, self._clock.now_ms())

    def _connected(self, peer: Incarnation) -> None:
        for job in self._jobs.values():
            if job.receiver.peer == peer:
                job.receiver.note(Connected())

    def _quiet(self, wire: inference_pb2.CloseRequest) -> None:
        """The sender acknowledged the close of this room and generation, and of no other."""
        room = RoomId(wire.room)
        if room in self.roster and self.roster.get(room).generation != wire.generation:
            raise PeerFault(f"room {room}: quiet for generation {wire.generation}, which is not ours")
        self.roster.note(room, Fenced(Proof.QUIET))

    def _depart(self, peer: Incarnation) -> None:
        """A prefill process is known to be gone: nothing of it can land any more. What it finished before
        is there, and is not lost with it (`drain-keeps-promises`)."""
        for job in self._jobs.values():
            if job.receiver.peer != peer or job.receiver.phase is Phase.SUCCESS:
                continue
            if job.receiver.phase is Phase.TRANSFERRING and job.record is None:
                self._see_slot(job)
            if job.record is None:
                cause = Cause(Reason.PREFILL_LOST, f"prefill worker {job.prefill.name} is gone")
                job.receiver.note(Failed(cause))
            job.receiver.note(Fenced(Proof.DEAD))
        self._peers.forget(peer)
        self._exposure.transfer.disconnect(peer)

    def _revoke(self) -> None:
        """Every room whose memory is exposed ends: all of it is about to go."""
        self._revoking = True
        cause = Cause(Reason.MEMORY_REVOKED, "decode: its memory was taken back from another, silent sender")
        for job in self._jobs.values():
            if job.receiver.phase is Phase.TRANSFERRING:
                job.receiver.note(Failed(cause))

    # ---- evidence

    def _see_slot(self, job: Job) -> bool:
        """Look for the seal. What is not this tenancy's own ends the room (`stale-never-served`)."""
        receiver = job.receiver
        holding = self._holdings.get(receiver.id)
        generation = Generation(holding.slot.generation)
        try:
            slot, checked = self._holdings.slots.view(holding.slot), self._checksum is not KvChecksum.OFF
            record = read_slot(slot, receiver.id, generation, check_sum=checked)
            if record is None:
                return False
            self._check(job, record)
            receiver.note(Landed(generation, record.pages))
        except (RecordCorrupt, RecordForeign, PeerFault) as error:
            receiver.note(Failed(Cause(Reason.RECORD_CORRUPT, f"decode: {error}")))
            return True
        job.record = record
        job.sequence.output[:] = [*job.request.output, record.first_token]
        if self._checksum is KvChecksum.PAGES:
            held = self._layout.pages_for(record.prompt_tokens) - receiver.pages_expected
            job.landed = PageSum(held * self._layout.page_tokens)
        else:
            self._sealed(job, record)
        return True

    def _see_sums(self) -> bool:
        checked = self._landing.take()
        for job, cause in checked:
            if cause is not None:
                job.receiver.note(Failed(cause))
            elif job.record is not None:
                self._sealed(job, job.record)
        return bool(checked)

    def _sealed(self, job: Job, record: MetadataRecord) -> None:
        generation = Generation(record.generation)
        job.receiver.note(Sealed(generation))
        checked = "" if job.landed is None else ", contents as computed"
        told = f"{record.pages} pages, generation {generation}{checked}"
        self._reporter.seen(job.receiver.id, "landed", told)

    def _check(self, job: Job, record: MetadataRecord) -> None:
        want = (job.request.prefill_tokens, job.receiver.pages_expected)
        if (record.prompt_tokens, record.pages) != want:
            raise RecordCorrupt(
                f"record of room {record.room} says {record.prompt_tokens} tokens in {record.pages} pages,"
                f" expected {want[0]} in {want[1]}"
            )
        tokens = (record.first_token, *(token for token, _ in record.alternatives))
        if not self._bounds.knows(tokens):
            raise RecordCorrupt(f"record of room {record.room} names a token that the model does not have")
        logprobs = (record.first_logprob or 0.0, *(logprob for _, logprob in record.alternatives))
        if not all(each < inf for each in logprobs):
            raise RecordCorrupt(f"record of room {record.room} has a logprob that is no number")

    def _see_step(self) -> None:
        """All that follows from its end is done in this turn: the next one is not for it."""
        try:
            tokens = self._stepper.take()
        except StepFailed as error:
            for job in self._step:
                job.receiver.busy = False
                job.receiver.note(Failed(Cause(Reason.ENGINE_FAILED, f"decode: {error}")))
            self._step = []
            return
        if tokens is None:
            return
        for job, token in zip(self._step, tokens, strict=True):
            job.receiver.busy = False
            if token is not None and not job.receiver.stopping:
                job.sequence.output.append(token.id)
                self._emit(job, token)
        self._metrics.decoded(len(tokens))
        self._drawn += len(tokens)
        self._metrics.worker.stepped((self._clock.host_us() - self._step_us) / 1e6)
        self._step = []

    # ---- effects

    def _grant(self, job: Job) -> None:
        """Reserve, expose, and only then tell: what is named to a peer is already marked exposed, on every
        rank (`exposure-on-page`). A slot that a late rank blanked after it was written would never be seen
        sealed."""
        receiver = job.receiver
        holding = self._holdings.take(receiver.id, receiver.pages_needed, job.given)
        receiver.expose(Generation(holding.slot.generation), holding.shared)
        self._holdings.expose(receiver.id, receiver.pages_expected)
        job.pages = holding.pages
        prefix_tokens = holding.shared * self._layout.page_tokens
        self._metrics.worker.reused(prefix_tokens, job.request.prefill_tokens)
        grant = inference_pb2.GrantRequest(
            room=receiver.id,
            incarnation=receiver.peer,
            receiver=self._incarnation,
            generation=holding.slot.generation,
            pages=holding.exposed,
            slot=holding.slot.index,
            exposure=self._exposure.id,
            prefix_tokens=prefix_tokens,
        )
        self._granting.append((job.prefill, grant))
        if len(self.endpoints) < 2:
            self._tell_senders()
        detail = (
            f"{len(holding.exposed)} pages behind {prefix_tokens} tokens held, slot {holding.slot.index},"
            f" generation {holding.slot.generation}"
        )
        self._tell(job, "granted", detail)

    def _tell_senders(self) -> None:
        for prefill, grant in self._granting:
            self._peers.grant(prefill, grant)
        self._granting.clear()

    def _admit(self, job: Job) -> None:
        """The pages are ours for good. The first token came in the record."""
        record = job.record
        if record is None:
            raise AssertionError(f"room {job.receiver.id} was admitted without its record")
        self._holdings.commit(job.receiver.id)
        job.pages = self._holdings.keep(job.receiver.id, job.given).pages
        self._metrics.admitted(sum(job.receiver.phase_ms.values()) / 1000)
        self._tell(job, "admitted")
        self._emit(job, Token(record.first_token, record.first_logprob, record.alternatives))

    def _emit(self, job: Job, token: Token) -> None:
        """Send the token that was just appended to the output; end the room with its last one."""
        output = job.sequence.output
        finish = job.request.finish_reason(output)
        tokens = inference_pb2.Tokens(
            first=len(output) - 1, tokens=[token_to_wire(token)], finish=finish_to_wire(finish)
        )
        self._reply(job, inference_pb2.StreamRoomReply(tokens=tokens))
        if finish is not None:
            job.finished = True
            job.receiver.note(Finished())
            self._reply(job, inference_pb2.StreamRoomReply(outcome=outcome_to_wire(None)))
            self._tell(job, "finished", f"{len(output)} tokens, {finish.value}")

    def _fail(self, job: Job) -> None:
        receiver = job.receiver
        self._end_early(job)
        if not self._holdings.quarantine(receiver.id):
            receiver.note(Fenced(Proof.UNEXPOSED))
        elif receiver.generation is not None and receiver.proof is not Proof.DEAD:
            # A seal that was seen proves it for this rank; the close is the leader's, and another rank may
            # have seen none. That a peer is dead is known to all.
            self._tell(job, "quarantined", "until the sender is quiet or gone")
            self._peers.close(job.prefill, receiver.id, receiver.generation)
            if job.receiver.cause is None or job.receiver.cause.reason not in CALLERS_OWN:
                self._peers.doubt(receiver.peer)

    def _take_memory_back(self) -> None:
        """The last resort, which is proof for every room in quarantine: what their senders know of leads
        nowhere. Admitted rooms keep their pages, at another address."""
        try:
            self._exposure.revoke()
        except (CannotMove, TransferError) as error:
            raise MemoryKept(f"exposed memory cannot be taken back from silent senders: {error}") from error
        self._holdings.slots.moved(self._slots.view)
        self._peers.doubt_all()
        for job in self._jobs.values():
            if in_quarantine(job.receiver):
                job.receiver.note(Fenced(Proof.REVOKED))
        self._revoking = self._revocation_asked = False
        self._untold = True
        self._metrics.revoked()
        log.warning("exposed memory taken back", exposure=self._exposure.id)

    def _end_early(self, job: Job) -> None:
        """The room ends before its sequence did: say why, at once."""
        cause = job.receiver.cause
        if cause is None:
            raise AssertionError(f"room {job.receiver.id} ended early without a cause")
        if job.finished:
            return
        self._reply(job, inference_pb2.StreamRoomReply(outcome=outcome_to_wire(cause)))
        self._metrics.worker.room_failed(cause)
        self._reporter.failed(job.receiver.id, cause)

    def _retire(self, job: Job) -> None:
        """The one way out of every table that knows the room (`one-retire`)."""
        receiver = job.receiver
        self._peers.stop_closing(receiver.id)
        if job.finished and not receiver.stopping:
            # Of one that was stopped, the ranks need not have seen the same steps end.
            self._holdings.keep(receiver.id, job.computed)
        self._holdings.give_back(receiver.id)
        self.roster.retire(receiver.id, self._clock.now_ms())
        del self._jobs[receiver.id]
        self._metrics.worker.room_retired(receiver)
        proof = "" if receiver.proof is None else receiver.proof.value
        self._reporter.retired(receiver.id, proof)

    # ---- small things

    def _queues(self, census: abc.Mapping[Phase, int]) -> dict[str, int]:
        unfinished = len(self._unfinished())
        return {
            "prealloc": census[Phase.BOOTSTRAPPING] + census[Phase.WAITING_FOR_INPUT],
            "transfer": census[Phase.TRANSFERRING],
            "waiting": max(unfinished - self._max_running, 0),
            "running": min(unfinished, self._max_running),
        }

    def _revocation_due(self) -> bool:
        receivers = (job.receiver for job in self._jobs.values())
        return revocation_due(receivers, self._clock.now_ms(), len(self._holdings.pages))

    def _unfinished(self) -> list[Job]:
        return [
            job
            for job in self._jobs.values()
            if job.receiver.phase is Phase.SUCCESS and not job.finished and not job.receiver.stopping
        ]

    def _reply(self, job: Job, reply: inference_pb2.StreamRoomReply) -> None:
        if job.replies is not None:
            job.replies.put_nowait(reply)

    def _tell(self, job: Job, name: str, detail: str = "") -> None:
        self._reporter.note(job.receiver.id, name, detail)

    def _touched(self) -> list[Job]:
        """Rooms whose pages are on their way, and whose seal may be there."""
        holdings = self._holdings
        return [
            job
            for job in self._jobs.values()
            if job.receiver.phase is Phase.TRANSFERRING
            and job.record is None
            and touched(holdings.slots.view(holdings.get(job.receiver.id).slot))
        ]

    def _look_s(self) -> float:
        """How soon to look for what wakes nobody."""
        receivers = [job.receiver for job in self._jobs.values()]
        if any(room.phase is Phase.TRANSFERRING for room in receivers):
            return POLL_S if self._stepper.free else BESIDE_STEP_S
        return DRAIN_S if any(in_quarantine(room) for room in receivers) else HEARTBEAT_S

    def _deadline_s(self) -> float:
        """How soon time alone may ask for a turn."""
        now_ms = self._clock.now_ms()
        rooms = [job.receiver for job in self._jobs.values()]
        waits = [(room.deadline_ms - now_ms, room.phase) for room in rooms]
        asking = (wait for wait, phase in waits if wait > 0 or phase is not Phase.FAILED)
        return min([HEARTBEAT_S, *(max(wait, 1) / 1000 for wait in asking)])
