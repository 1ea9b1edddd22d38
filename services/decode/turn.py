"""What does a decode rank see, do and compute in a turn?

Queues, in the field's words: *prealloc* (no pages yet), *transfer* (pages granted, not landed on every
rank), *waiting* (admitted, no space in the batch) and *running*. They follow from the rooms' phases and
their order; there are no lists beside the roster that could disagree with it.
"""

import asyncio
from collections import abc
from typing import assert_never

from services.decode.answers import Answers
from services.decode.batch import how_many
from services.decode.commands import Commands
from services.decode.computing import Computing
from services.decode.grants import Grants
from services.decode.job import Job
from services.decode.landing import LandingCheck
from services.decode.metrics import DecodeMetrics
from services.decode.peers import Peers
from services.decode.rest import deadline_s, look_s
from services.decode.revocation import Revocation
from services.decode.seals import NEAR_S, Seals
from services.ids import Incarnation, RoomId
from services.pages.checksum import KvChecksum
from services.pages.holdings import Holdings
from services.pages.layout import KvLayout
from services.rooms.deadlines import Deadlines
from services.rooms.errors import Cause, Reason
from services.rooms.evidence import Fenced, Proof
from services.rooms.phases import Effect, Phase, ReceiverEffect, Vote
from services.rooms.plurals import counted
from services.rooms.reasons import REASONS, Fault
from services.rooms.receiver import Receiver
from services.rooms.request import Token
from services.rooms.room import Room
from services.rooms.roster import Capacity, Roster
from services.rooms.timeline import Moment
from services.runtime.clock import Clock
from services.runtime.host_memory import HostMemory
from services.transfer.exposure import Exposure
from services.wire.baton.v1 import group_pb2, inference_pb2, workers_pb2
from services.wire.census import census_to_wire
from services.wire.model_bounds import ModelBounds
from services.worker.callers import Callers
from services.worker.folds import Folds
from services.worker.mailbox import Mailbox
from services.worker.reporter import Reporter, wish_told
from services.worker.stepper import Stepper

"""Ends that say nothing about the way to the sender."""


class DecodeWork:
    """The decode side of `services.worker.turns.Work`. Every table is keyed by room and emptied by
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
        near_s: float = NEAR_S,
        folds: Folds | None = None,
    ) -> None:
        """`near_s`: as of `Seals`. `folds`: of the rank that draws."""
        self.roster: Roster[Receiver] = Roster(places)
        self.callers: Callers[inference_pb2.StreamRoomReply] = Callers(mailbox, self.roster)
        self._holdings = holdings
        self._exposure = exposure
        self._peers = peers
        self._mailbox = mailbox
        self._reporter = reporter
        self._metrics = metrics
        self._clock = clock
        self._max_running = max_running
        self._jobs: dict[RoomId, Job] = {}
        self._folds = Folds(None, mailbox.wake) if folds is None else folds
        self._answers = Answers(reporter, metrics.worker)
        self._computing = Computing(stepper, max_running, answers=self._answers, metrics=metrics, clock=clock)
        self._seals = Seals(holdings, layout, bounds, checksum, reporter, near_s)
        self._landing = LandingCheck(stepper, layout)
        self._grants = Grants(incarnation, holdings, layout, exposure, peers, reporter, metrics.worker)
        self._revocation = Revocation(exposure, holdings, slots, peers, metrics)
        self._commands = Commands(
            roster=self.roster,
            jobs=self._jobs,
            callers=self.callers,
            bounds=bounds,
            folds=self._folds,
            layout=layout,
            cache_pages=len(holdings.pages),
            deadlines=deadlines,
            peers=peers,
            exposure=exposure,
            seals=self._seals,
            revocation=self._revocation,
            answers=self._answers,
            mailbox=mailbox,
            clock=clock,
        )
        self._turns = 0

    # ---- what the leader's process calls

    @property
    def draining(self) -> bool:
        return self._commands.draining

    @property
    def endpoints(self) -> abc.Sequence[inference_pb2.Endpoint]:
        """Of every rank, in rank order, once they have told."""
        return self._grants.endpoints

    def names_of(self, room: RoomId) -> abc.Mapping[str, str]:
        """What a room's request is known by; nothing once it is retired."""
        job = self._jobs.get(room)
        return {} if job is None else job.request.names

    def break_off(self, cause: Cause) -> None:
        """This worker ends here and now: tell whoever was not told how its room ended. Nothing is given back:
        all that is held ends with the process."""
        self._answers.break_off(self._jobs.values(), cause)

    def census(self) -> workers_pb2.WorkerCensus:
        """What is held right now, for people to look at."""
        rooms = self.roster.census()
        return census_to_wire(self._queues(rooms), rooms, self._holdings, self._turns, self._computing.tokens)

    # ---- Work

    def take_commands(self) -> bytes:
        if self._revocation.due(self.roster, self._clock.now_ms()):
            self._mailbox.put(group_pb2.Command(revoke=True))
        return self._mailbox.take()

    def apply(self, commands: bytes) -> None:
        self._commands.apply(commands)

    def see(self) -> bool:
        self._computing.see()
        summed = self._landing.take()
        for job, cause in summed:
            self._seals.summed(job, cause)
        news = bool(summed) | self._folds.see()
        self._exposure.transfer.notices()
        for job in self._seals.touched(self._jobs.values()):
            news |= self._seals.look(job)
        self._landing.start(self._jobs.values(), batch_waits=how_many(self._jobs.values()) > 0)
        return news

    def capacity(self) -> Capacity:
        if self._revocation.agreed:
            return Capacity(0, 0)  # nothing is exposed that would have to be taken back at once
        holdings = self._holdings
        return Capacity(holdings.available, holdings.slots.free, holdings.prefixes.digest)

    def may_compute(self) -> bool:
        return self._computing.free

    def may_leave(self) -> bool:
        return self.draining and not self._jobs and self._mailbox.empty

    def connects(self) -> int:
        return 0

    def agreed(self, connects: int) -> None:
        """Nobody connects to a decode worker. But where every rank agrees anew, every rank has done what the
        turn before asked of it: what the leader reserved and exposed then, the others have, too."""
        if connects:
            raise AssertionError(f"{connects} connections to a decode worker")
        self._grants.tell_senders()

    def told(self) -> bytes | None:
        return self._grants.told()

    def hear(self, told: abc.Sequence[bytes]) -> None:
        self._grants.hear(told)

    def voted(self, room: Room, wish: Vote, now_ms: int) -> None:
        job = self._jobs[room.id]
        if job.voted != (room.phase, wish):
            job.voted = (room.phase, wish)
            self._reporter.seen(room.id, Moment.VOTED, wish_told(room, wish, now_ms))

    def perform(self, room: Room, effect: Effect | ReceiverEffect) -> None:
        job = self._jobs[room.id]
        match effect:
            case Effect.QUEUE:
                self._reporter.note(room.id, Moment.CONNECTED)
            case ReceiverEffect.GRANT:
                self._grants.grant(job)
            case ReceiverEffect.ADMIT:
                self._admit(job)
            case Effect.STOP:
                self._distrust(room)
                self._answers.end_early(job)
            case Effect.FENCE:
                self._distrust(room)
                self._fail(job)
            case Effect.RELEASE:
                self._retire(job)
            case _:
                assert_never(effect)

    def compute(self) -> bool:
        if self._revocation.agreed:
            self._revocation.carry_out(self.roster)
            self._grants.moved()
            return True
        if self._computing.start(self._jobs.values()):
            self._landing.stepped()
        return False

    def record(self, agreement_s: float) -> None:
        census = self.roster.census()
        self._metrics.worker.record_turn(agreement_s, self._reporter.dropped)
        self._metrics.worker.record_rooms(census, self.roster.dropped.total())
        self._metrics.worker.record_memory(self._holdings.pages.census(), self._holdings.slots.census())
        self._metrics.record_queues(**self._queues(census), most=self._max_running)
        self._turns += 1

    def _queues(self, census: abc.Mapping[Phase, int]) -> dict[str, int]:
        count = how_many(self._jobs.values())
        return {
            "prealloc": census[Phase.BOOTSTRAPPING] + census[Phase.WAITING_FOR_INPUT],
            "transfer": census[Phase.TRANSFERRING],
            "waiting": max(count - self._max_running, 0),
            "running": min(count, self._max_running),
        }

    async def rest(self) -> bool:
        """Until a turn may have something to do. NIXL is driven by its callers: while something may land, it
        is driven here, and a turn is taken when a seal is there. With others in the group, every look is a
        turn, since they look in turns alone. Where a record says that its seal is near, there is no pause."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + deadline_s(self.roster, self._clock.now_ms())
        while (left_s := ends - loop.time()) > 0:
            free = self._computing.free
            if free and self._seals.near(self._jobs.values(), loop.time()):
                await asyncio.sleep(0)
            else:
                await self._mailbox.rest(min(look_s(self.roster, engine_free=free), left_s))
            if self._mailbox.news.is_set() or len(self.endpoints) > 1:
                break
            self._exposure.transfer.notices()
            if self._seals.touched(self._jobs.values()):
                break
        return self._mailbox.news.is_set()

    async def pause(self, most_s: float) -> None:
        await self._mailbox.rest(most_s)

    # ---- effects

    def _admit(self, job: Job) -> None:
        """The pages are ours for good. Choice 0's first token came in the record; the others draw theirs."""
        record = job.record
        if record is None:
            raise AssertionError(f"room {job.receiver.id} was admitted without its record")
        self._holdings.commit(job.receiver.id)
        job.lay(self._holdings.keep(job.receiver.id, job.given).pages)
        first, *further = job.choices
        first.computed = job.request.prefill_tokens
        for choice in further:
            choice.computed = job.division.shared_tokens
        self._metrics.admitted(sum(job.receiver.phase_ms.values()) / 1000)
        self._reporter.note(job.receiver.id, Moment.ADMITTED)
        if further:
            self._reporter.note(job.receiver.id, Moment.FORKED, counted(len(further), "further choice"))
        if first.place in job.ends.going_on:
            token = Token(record.first_token, record.first_logprob, record.alternatives)
            self._answers.emit(job, first, token)

    def _distrust(self, room: Room) -> None:
        """A page that it shared may be why its step failed: nobody else is to begin with that, least of all
        the request's next room, which comes before this one is released."""
        if room.ended_for is Reason.ENGINE_FAILED:
            self._holdings.distrust(room.id)

    def _fail(self, job: Job) -> None:
        receiver = job.receiver
        self._answers.end_early(job)
        if not self._holdings.quarantine(receiver.id):
            receiver.note(Fenced(Proof.UNEXPOSED))
        elif receiver.generation is not None and receiver.proof is not Proof.DEAD:
            # A seal that was seen proves it for this rank; the close is the leader's, and another rank may
            # have seen none. That a peer is dead is known to all.
            self._reporter.note(receiver.id, Moment.QUARANTINED, "until the sender is quiet or gone")
            self._peers.close(job.prefill, receiver.id, receiver.generation)
            if receiver.cause is not None and REASONS[receiver.cause.reason].fault is not Fault.CALLER:
                self._peers.doubt(receiver.peer)

    def _retire(self, job: Job) -> None:
        """The one way out of every table that knows the room (`one-retire`)."""
        receiver = job.receiver
        self._peers.over(receiver.id)
        if job.finished and not receiver.stopping and 0 not in job.ends.cut:
            # Of one that was stopped or cut, the ranks need not have seen the same steps end.
            self._holdings.keep(receiver.id, job.computed)
        self._holdings.give_back(receiver.id)
        self.roster.retire(receiver.id, self._clock.now_ms())
        del self._jobs[receiver.id]
        self._folds.forget(receiver.id)
        self._metrics.worker.room_retired(receiver)
        proof = "" if receiver.proof is None else receiver.proof.value
        self._reporter.retired(receiver.id, proof)
