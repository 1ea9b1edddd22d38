"""What does a prefill rank see, do and compute in a turn?

Queues, in the field's words: *bootstrap* (no destination yet), *waiting* (destination known, to be
computed), *inflight* (computed, not all written). A room's queue follows from its phase and from how much
of its prompt is computed; there are no lists beside the roster that could disagree with it.
"""

import asyncio
from collections import abc
from typing import Final

from services.engine.engine import PageSum, Row
from services.engine.stepper import StepFailed, Stepper
from services.pages.checksum import KvChecksum
from services.pages.errors import LayoutMismatch, Truncated
from services.pages.holdings import Holdings
from services.pages.layout import KvLayout
from services.pages.record import MetadataRecord
from services.prefill.batch import Part, next_parts
from services.prefill.job import Job
from services.prefill.metrics import PrefillMetrics
from services.prefill.push import Push, Stage
from services.prefill.ways import Ways
from services.rooms.deadlines import Deadlines
from services.rooms.errors import Cause, PeerFault, Reason, Refusal, UnknownRoom
from services.rooms.evidence import Failed, Fenced, Finished, Granted, Proof, Sealed, Written
from services.rooms.ids import Generation, Incarnation, RoomId
from services.rooms.phases import GATED, LIVE, Effect, Phase, Vote
from services.rooms.request import Token
from services.rooms.room import Room
from services.rooms.roster import Capacity, Roster
from services.rooms.sender import Sender
from services.runtime.clock import Clock
from services.runtime.logging import Log
from services.transfer.interface import Transfer
from services.wire.baton.v1 import group_pb2, inference_pb2, workers_pb2
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
from services.wire.errors import NotConnected
from services.wire.mailbox import Answer, Mailbox
from services.wire.model_bounds import ModelBounds
from services.wire.reporter import Reporter, wish_told

log = Log(__name__)

HEARTBEAT_S: Final = 1.0
POLL_S: Final = 0.001
LOOKS_MAX: Final = 16
"""Turns without a pause, while no step runs, after something of what is under way has moved: most writes end
sooner than the shortest pause."""
CHUNK_LINES_MAX: Final = 64
"""Of one room's timeline, but for the steps in which it shared its budget with others."""


class PrefillWork:
    """The prefill side of `services.parallel.turns.Work`. Every table is keyed by room or by incarnation
    and emptied by `_retire` or `_depart`."""

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
    ) -> None:
        self.roster: Roster[Sender] = Roster(places)
        self.draining = False
        self._holdings = holdings
        self._layout = layout
        self._bounds = bounds
        self._stepper = stepper
        self._transfer = transfer
        self._mailbox = mailbox
        self._reporter = reporter
        self._metrics = metrics
        self._clock = clock
        self._deadlines = deadlines
        self._chunk_tokens = chunk_tokens
        self._window_bytes = window_bytes
        self._jobs: dict[RoomId, Job] = {}
        self.callers: Callers[inference_pb2.RunRoomReply] = Callers(mailbox)
        self._ways = ways
        self._connecting: list[tuple[Answer, Exception | None]] = []
        """The turn's connections, and what became of them on this rank."""
        self._checksum = checksum
        self._step: list[Part] = []
        self._step_us = 0
        """When it was started."""
        self._turns = 0
        self._tokens = 0
        """Computed, since start."""
        self._looks = 0
        """Turns without a pause, from here on."""
        self._held_back = False
        """Nothing is posted in this turn. Never twice in a row, however fast steps are."""

    # ---- what the handlers of the leader call

    async def quiet(self, room: RoomId, timeout_s: float) -> None:
        """Wait for the proof that nothing is or will be written for a room that was closed (`ack-is-proof`).
        Raises TimeoutError, which proves nothing."""
        job = self._jobs.get(room)
        if job is None:
            return
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        job.closers.append(closed)
        try:
            async with asyncio.timeout(timeout_s):
                await closed
        except TimeoutError as error:
            raise TimeoutError(f"room {room} is not proven quiet after {timeout_s:g} s") from error
        finally:
            job.closers.remove(closed)

    def names_of(self, room: int) -> abc.Mapping[str, str]:
        """What a room's request is known by; nothing once it is retired."""
        job = self._jobs.get(RoomId(room))
        return {} if job is None else job.request.names

    def break_off(self, cause: Cause) -> None:
        """This worker ends here and now: tell whoever still waits for a room, with what ended it before if
        anything did (`first-cause-wins`). Nothing is given back: all that is held ends with the process."""
        for job in self._jobs.values():
            if job.sender.phase in LIVE:
                outcome = outcome_to_wire(job.sender.cause or cause)
                self._reply(job, inference_pb2.RunRoomReply(outcome=outcome))

    def census(self) -> workers_pb2.WorkerCensus:
        """What is held right now, for people to look at."""
        rooms = self.roster.census()
        return census_to_wire(self._queues(rooms), rooms, self._holdings, self._turns, self._tokens)

    # ---- Work

    def take_commands(self) -> bytes:
        return self._mailbox.take()

    def apply(self, commands: bytes) -> None:
        for command in group_pb2.Commands.FromString(commands).commands:
            problem: Exception | None = None
            try:
                self._apply(command)
            except (Refusal, PeerFault, Truncated, LayoutMismatch) as error:
                problem = error
            if command.WhichOneof("what") == "connect":
                self._connecting.append((self._mailbox.hold(), problem))
            else:
                self._mailbox.answer(problem)

    def see(self) -> bool:
        news = self._see_step()
        self._held_back = news and not self._held_back
        self._transfer.notices()
        for job in list(self._jobs.values()):
            if job.sender.phase in GATED:
                # Posting may copy: first tokens leave before their pages do, and the next step starts.
                if not self._held_back and self._see_push(job):
                    news, self._looks = True, LOOKS_MAX
            elif job.sender.phase is Phase.FAILED and job.sender.proof is None and not job.sender.busy:
                news |= self._see_quiet(job)
        return news

    def capacity(self) -> Capacity:
        holdings = self._holdings
        return Capacity(holdings.available, holdings.slots.free, holdings.prefixes.digest)

    def may_compute(self) -> bool:
        return self._stepper.free

    def may_leave(self) -> bool:
        return self.draining and not self._jobs and self._mailbox.empty

    def connects(self) -> int:
        problems = [problem is not None for _, problem in self._connecting]
        return problems.index(True) if True in problems else len(problems)

    def agreed(self, connects: int) -> None:
        """Behind the first that failed it is not known of the others what became of them: asked again, a
        connection that was made is found."""
        for place, (answer, problem) in enumerate(self._connecting):
            if place >= connects and problem is None:
                problem = NotConnected("not every rank of this prefill worker reaches the decode worker")
            answer(problem)
        self._connecting.clear()

    def told(self) -> bytes | None:
        return None

    def hear(self, told: abc.Sequence[bytes]) -> None:  # noqa: ARG002
        raise AssertionError("the ranks of a prefill worker tell each other nothing")

    def voted(self, room: Room, wish: Vote, now_ms: int) -> None:
        job = self._jobs[room.id]
        if job.voted != (room.phase, wish):
            job.voted = (room.phase, wish)
            self._reporter.seen(room.id, "voted", wish_told(room, wish, now_ms))

    def perform(self, room: Room, effect: Effect) -> None:
        job = self._jobs[room.id]
        match effect:
            case Effect.QUEUE:
                self._tell(job, "destination known")
            case Effect.COMPUTE:
                self._begin(job)
            case Effect.SEAL:
                self._seal(job)
            case Effect.REPORT:
                self._reply(job, inference_pb2.RunRoomReply(outcome=outcome_to_wire(None)))
                job.sender.note(Finished())
            case Effect.STOP:
                self._tell(job, "stopped", "after its outcome was reported")
            case Effect.FENCE:
                self._fail(job)
            case Effect.RELEASE:
                self._retire(job)
            case Effect.GRANT | Effect.ADMIT:
                raise AssertionError(f"{effect.value} is not a sender's")

    def compute(self) -> bool:
        parts = next_parts(self._computable(), self._chunk_tokens)
        if not parts:
            return False
        rows = [Row(part.job.sequence, part.start, part.stop, part.job.pages, part.last) for part in parts]
        for part in parts:
            part.job.sender.busy = True
        self._step, self._step_us = parts, self._clock.host_us()
        self._stepper.start(rows)
        return False

    def record(self, agreement_s: float) -> None:
        census = self.roster.census()
        self._metrics.worker.record_turn(agreement_s, self._reporter.dropped)
        self._metrics.worker.record_rooms(census, self.roster.dropped.total())
        self._metrics.worker.record_memory(self._holdings.pages.census(), self._holdings.slots.census())
        self._metrics.record_queues(**self._queues(census))
        self._turns += 1

    async def rest(self) -> None:
        if self._looks and self._stepper.free and self._under_way():
            self._looks -= 1
            await asyncio.sleep(0)
        else:
            await self._mailbox.rest(self._rest_s())

    # ---- commands

    def _apply(self, command: group_pb2.Command) -> None:
        match command.WhichOneof("what"):
            case "run":
                self._open(command.run)
            case "grant":
                self._grant(command.grant)
            case "cancel":
                cause = cause_from_wire(command.cancel.cause)
                self.roster.cancel(RoomId(command.cancel.room), cause, self._clock.now_ms())
            case "close":
                self._close(command.close)
            case "connect":
                self._ways.connect(command.connect)
            case "departed":
                self._depart(Incarnation(command.departed))
            case "drain":
                self.draining = True
            case other:
                raise PeerFault(f"{other} is not a command for a prefill worker")

    def _open(self, wire: inference_pb2.RunRoomRequest) -> None:
        room, request = room_from_wire(wire.room), request_from_wire(wire.request)
        check_peer(wire.decode, "decode")
        self._bounds.check(request)
        pages = self._layout.pages_for(request.prefill_tokens)
        if pages > len(self._holdings.pages):
            raise Refusal(
                f"{request.prefill_tokens} tokens to compute: the cache of this worker never holds it"
            )
        now_ms = self._clock.now_ms()

        def make(place: int) -> Sender:
            peer = Incarnation(wire.decode.incarnation)
            return Sender(
                room,
                request.request_id,
                peer,
                place,
                pages,
                self._deadlines,
                now_ms,
                elected=self._ways.elected,
            )

        sender = self.roster.open(room, make, now_ms)
        job = Job(sender, request, wire.decode.name, self.callers.take(room))
        self._jobs[room] = job
        self._reporter.opened(room, request)
        self._reply(job, inference_pb2.RunRoomReply(accepted=inference_pb2.Accepted()))
        self._tell(job, "accepted", f"{request.prefill_tokens} tokens to compute, {pages} pages")

    def _grant(self, wire: inference_pb2.GrantRequest) -> None:
        room, receiver = RoomId(wire.room), Incarnation(wire.receiver)
        grant = Granted(Generation(wire.generation), tuple(wire.pages), wire.slot, wire.prefix_tokens)
        if room not in self.roster:
            self.roster.note(room, grant)  # counted, and creates nothing
            raise UnknownRoom(f"room {room} is not known here")
        sender = self.roster.get(room)
        if receiver != sender.peer:
            raise PeerFault(f"room {room}: the registry named another receiver")  # `authorised-writer`
        job = self._jobs[room]
        try:
            way = self._ways.granted(receiver, Incarnation(wire.exposure))
        except NotConnected as error:
            if not self._ways.elected:
                # The leader answers the grant, and may have taken it: this rank alone ends the room.
                sender.note(Failed(Cause(Reason.CONNECT_FAILED, f"prefill: {error}")))
            raise
        # `promise-kept`: what the receiver holds already are whole pages, which are not written over.
        if wire.prefix_tokens % way.page_tokens or wire.prefix_tokens > job.request.prefill_tokens:
            raise PeerFault(
                f"room {room}: a prefix of {wire.prefix_tokens} tokens does not end with a page of its"
                f" {job.request.prefill_tokens}"
            )
        expected = -(-(job.request.prefill_tokens - wire.prefix_tokens) // way.page_tokens)
        if len(grant.pages) != expected:
            raise Truncated(f"room {room}: {len(grant.pages)} pages granted, {expected} to be sent")
        sender.note(grant)
        job.way = way

    def _close(self, wire: inference_pb2.CloseRequest) -> None:
        """The answer to a close is a proof, so it is for the room's own receiver and tenancy alone."""
        room = room_from_wire(wire.room)
        if room in self.roster:
            sender = self.roster.get(room)
            if sender.peer != wire.receiver:
                raise PeerFault(f"room {room}: the registry named another receiver")
            if sender.grant is not None and sender.grant.generation != wire.generation:
                raise PeerFault(f"room {room}: generation {wire.generation} was not granted")
        cause = Cause(Reason.RECEIVER_CLOSED, "the decode worker gave the room up")
        self.roster.cancel(room, cause, self._clock.now_ms())

    def _depart(self, peer: Incarnation) -> None:
        """A decode process is known to be gone: nothing can land in it any more."""
        for job in self._jobs.values():
            if job.sender.peer == peer:
                job.sender.note(Failed(Cause(Reason.DECODE_LOST, f"decode worker {job.decode_name} is gone")))
                job.sender.note(Fenced(Proof.DEAD))
        self._ways.forget(peer)

    # ---- evidence

    def _see_step(self) -> bool:
        try:
            tokens = self._stepper.take()
        except StepFailed as error:
            for part in self._step:
                part.job.sender.busy = False
                part.job.sender.note(Failed(Cause(Reason.ENGINE_FAILED, f"prefill: {error}")))
            self._step = []
            return True
        if tokens is None:
            return False
        self._metrics.worker.stepped((self._clock.host_us() - self._step_us) / 1e6)
        now_ms = self._clock.now_ms()
        for part, token in zip(self._step, tokens, strict=True):
            part.job.sender.busy = False
            part.job.computed = part.stop
            self._metrics.computed(part.stop - part.start)
            self._tokens += part.stop - part.start
            self._computed(part.job, token)
        self._step = []
        for job in self._computable():
            job.sender.progressed(now_ms)
        return True

    def _computed(self, job: Job, token: Token | None) -> None:
        """A chunk is in the pages: send what is whole, and with the last one the first token."""
        if job.push is None or job.sender.phase is not Phase.TRANSFERRING:
            return
        job.push.ready(job.computed, complete=job.complete)
        job.sender.progressed(self._clock.now_ms())
        if token is None:
            # A long prompt's chunks do not take the place of what comes after them.
            if job.computed - job.told >= job.request.prefill_tokens / CHUNK_LINES_MAX:
                job.told = job.computed
                self._tell(job, "chunk computed", f"{job.computed} tokens so far")
            return
        job.first = token
        spent_ms = sum(job.sender.phase_ms.values()) + self._clock.now_ms() - job.sender.entered_ms
        self._metrics.first_token(spent_ms / 1000)
        finish = finish_to_wire(job.request.finish_reason([*job.request.output, token.id]))
        first = inference_pb2.FirstToken(token=token_to_wire(token), finish=finish, cached_tokens=job.cached)
        self._reply(job, inference_pb2.RunRoomReply(first_token=first))
        self._tell(job, "first token", f"{job.computed - job.cached} tokens computed, {job.cached} cached")

    def _see_push(self, job: Job) -> bool:
        push, sender = job.push, job.sender
        if push is None or sender.grant is None or sender.sealed or sender.cause is not None:
            return False
        moved = self._advance(job, push)
        if push.failure is not None:
            sender.note(Failed(Cause(Reason.TRANSFER_FAILED, push.failure)))
            return True
        now_ms = self._clock.now_ms()
        if moved:
            sender.progressed(now_ms)
        if push.written and not sender.written:
            sender.note(Written())
            self._reporter.seen(sender.id, "written", f"what this rank sends of {job.computed} tokens")
            moved = True
        if sender.written and (sender.phase is Phase.TRANSFERRING or not sender.elected):
            sender.progressed(now_ms)  # only another rank can be late now, and it counts that itself
        if push.stage is Stage.SEALED:
            sender.note(Sealed(sender.grant.generation))
            spent_ms = sender.phase_ms[Phase.TRANSFERRING] + now_ms - sender.entered_ms
            self._metrics.sealed(spent_ms / 1000)
            self._metrics.transferred(job.overlap.spent_us / 1e6, job.overlap.hidden_us / 1e6)
            pages = f"{len(sender.grant.pages)} pages, generation {sender.grant.generation}"
            self._tell(job, "sealed", f"{pages}, {job.overlap.told}")
        return moved

    def _advance(self, job: Job, push: Push) -> bool:
        if not push.under_way:
            return push.advance(self._metrics.sent)

        def sent(length: int) -> None:
            self._metrics.sent(length)
            job.overlap.length += length

        start_us, beside = self._clock.host_us(), not self._stepper.free
        moved = push.advance(sent)
        job.overlap.looked(start_us, self._clock.host_us(), goes_on=push.under_way, beside=beside)
        return moved

    def _see_quiet(self, job: Job) -> bool:
        """Until its writes have ended a failed room keeps its pages, which they read (`source-pinned`)."""
        if job.push is None:
            job.sender.note(Fenced(Proof.UNEXPOSED))
            return True
        if job.push.drain(self._metrics.sent):
            job.sender.note(Fenced(Proof.QUIET))
            return True
        return False

    # ---- effects

    def _begin(self, job: Job) -> None:
        sender, grant = job.sender, job.sender.grant
        if grant is None or job.way is None:
            raise AssertionError(f"room {sender.id} computes without a destination")
        # The last token is computed in any case: what follows it is drawn from that.
        holding = self._holdings.take(sender.id, sender.pages_needed, job.tokens[:-1])
        job.pages = holding.pages
        job.cached = job.computed = holding.shared * self._layout.page_tokens
        self._metrics.worker.reused(job.cached, job.request.prefill_tokens)
        if self._checksum is KvChecksum.PAGES:
            job.sequence.page_sum = PageSum(grant.prefix_tokens)
        job.push = Push(
            self._transfer,
            job.way,
            holding.pages,
            self._layout.page_tokens,
            grant,
            self._window_bytes,
            self._holdings.slots.view(holding.slot),
            holding.slot.index,
        )
        job.push.ready(job.computed)
        self._tell(job, "computing", f"{len(holding.pages)} pages, {job.cached} tokens cached")

    def _seal(self, job: Job) -> None:
        """The pages of every rank are there: the elected one says so to each rank of the receiver."""
        sender, push, token = job.sender, job.push, job.first
        if push is None or token is None or sender.grant is None:
            raise AssertionError(f"room {sender.id} is sealed before it was computed")
        self._holdings.keep(sender.id, job.tokens)
        if not sender.elected:
            return
        record = MetadataRecord(
            room=sender.id,
            generation=sender.grant.generation,
            prompt_tokens=job.request.prefill_tokens,
            cached_tokens=job.cached,
            pages=len(sender.grant.pages),
            first_token=token.id,
            first_logprob=token.logprob,
            alternatives=token.top,
        )
        push.conclude(record, job.pages_checksum)
        self._see_push(job)

    def _fail(self, job: Job) -> None:
        cause = job.sender.cause
        if cause is None:
            raise AssertionError(f"room {job.sender.id} failed without a cause")
        self._reply(job, inference_pb2.RunRoomReply(outcome=outcome_to_wire(cause)))
        self._metrics.worker.room_failed(cause)
        self._reporter.failed(job.sender.id, cause)

    def _retire(self, job: Job) -> None:
        """The one way out of every table that knows the room (`one-retire`)."""
        sender = job.sender
        self._holdings.give_back(sender.id)
        self.roster.retire(sender.id, self._clock.now_ms())
        del self._jobs[sender.id]
        for closed in job.closers:
            if not closed.done():
                closed.set_result(None)
        self._metrics.worker.room_retired(sender)
        self._reporter.retired(sender.id)

    # ---- small things

    def _queues(self, census: abc.Mapping[Phase, int]) -> dict[str, int]:
        waiting = sum(
            job.sender.phase is Phase.TRANSFERRING and not job.complete for job in self._jobs.values()
        )
        return {
            "bootstrap": census[Phase.BOOTSTRAPPING],
            "waiting": census[Phase.WAITING_FOR_INPUT] + waiting,
            "inflight": census[Phase.TRANSFERRING] + census[Phase.SEALING] - waiting,
        }

    def _computable(self) -> abc.Iterable[Job]:
        return [
            job for job in self._jobs.values() if job.sender.phase is Phase.TRANSFERRING and not job.complete
        ]

    def _reply(self, job: Job, reply: inference_pb2.RunRoomReply) -> None:
        if job.replies is not None:
            job.replies.put_nowait(reply)

    def _tell(self, job: Job, name: str, detail: str = "") -> None:
        self._reporter.note(job.sender.id, name, detail)

    def _under_way(self) -> bool:
        return any(job.push is not None and job.push.under_way for job in self._jobs.values())

    def _rest_s(self) -> float:
        rooms = [job.sender for job in self._jobs.values()]
        if self._under_way():
            return POLL_S
        now_ms = self._clock.now_ms()
        waits = [room.deadline_ms - now_ms for room in rooms if room.phase is not Phase.FAILED]
        return min([HEARTBEAT_S, *(max(wait, 1) / 1000 for wait in waits)])
