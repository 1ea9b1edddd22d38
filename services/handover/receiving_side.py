"""Hand-over decisions of one rank of a decode worker.

The rank grants memory to prefill workers, recognises data that landed in it, and admits the room to decoding.
If the room failed, the rank withholds the memory until no write can land there any more. See the package's
docstring for how it is driven.
"""

from collections.abc import Callable, Sequence
from operator import gt
from typing import Final, TypeVar, assert_never

from baton.handover.landed_data import LandedData
from baton.handover.page_growth import DraftReach, PageGrowth, Space
from baton.handover.receiving_room import ReceivingRoom
from baton.handover.requests import (
    ClaimRoom,
    Close,
    Connect,
    Forget,
    Grant,
    Join,
    Outcome,
)
from baton.ids import NO_OPENER, NO_PEER, Generation, Incarnation, Opener, PageCounts, RoomId
from baton.pages.holdings import Holdings
from baton.pages.kv_checksum import KvChecksum
from baton.pages.layout import KvLayout
from baton.rooms.choice_pages import ChoicePages
from baton.rooms.deadlines import Deadlines
from baton.rooms.errors import Cause, PeerFault, Reason, Refusal
from baton.rooms.evidence import Computed, Connected, Fenced, Finished, Proof
from baton.rooms.phases import Effect, Phase, ReceiverEffect
from baton.rooms.plurals import counted
from baton.rooms.quarantine import in_quarantine, revocation_due
from baton.rooms.reasons import REASONS, Fault
from baton.rooms.request import FinishReason, Request, Token
from baton.rooms.roster import NOTHING, ROWS_MAX, Capacity
from baton.rooms.timeline import Moment
from baton.rooms.worker_load import WorkerLoad

NEAR_S: Final = 0.01
"""Seconds for which the seal (the mark that all data is written) is polled without pauses once the record has
arrived. The seal usually follows in a few milliseconds."""

R = TypeVar("R", bound=ReceivingRoom)


class ReceivingSide(LandedData[R]):
    """State machine of one decode rank for all hand-overs that it receives.

    Invariants:

    * `exposure-on-page`: memory is marked exposed on every rank before a peer gets its address.
    * `no-free-under-write`: exposed memory is committed by its seal, or waits in quarantine for a proof.
    * `stale-never-served`: landed data is used only if it is complete and has the slot's present generation.
    """

    def __init__(
        self,
        make: Callable[..., R],
        room_limit: int,
        holdings: Holdings,
        layout: KvLayout,
        deadlines: Deadlines,
        *,
        exposure: Incarnation,
        ranks: int = 1,
        vocabulary: int,
        checksum: KvChecksum = KvChecksum.RECORD,
        near_s: float = NEAR_S,
        running_max: int = ROWS_MAX,
    ) -> None:
        """Make a side without rooms.

        `exposure`: id under which this rank's memory is exposed to senders. `ranks`: number of ranks of this
        worker. `vocabulary`: number of token ids of the model. `near_s`: seconds to poll for a seal without
        pauses once its record has arrived. `running_max`: most sequences of a step.
        """
        super().__init__(
            make,
            room_limit,
            holdings,
            layout,
            deadlines,
            vocabulary=vocabulary,
            checksum=checksum,
            near_s=near_s,
        )
        self.revoking = False
        """Whether all ranks agreed on a revocation, which moves the exposed memory out of reach of all
        senders. The driver carries it out when no step runs (`revoked`)."""
        self._exposure = exposure
        self._ranks = ranks
        self._granting: list[Grant] = []
        """Grants whose memory this rank has exposed, but perhaps not yet the other ranks. They are sent when
        all ranks have."""
        self._asked_to_revoke = False
        self._lacks_since_ms: int | None = None
        """Time in milliseconds at which running rooms began to wait for pages, if they have waited ever
        since. None if no room waits."""
        self.page_growth = PageGrowth(self.roster, holdings, layout, running_max)
        self.beside_tokens = self.near_tokens = layout.block_tokens
        """Most prompt tokens that this worker computes in a step which also decodes running sequences.

        `near_tokens` is the limit for steps without running sequences, if a room may begin to decode soon.
        The leader sets both by command.
        """

    # ---- commands, the same on every rank

    def open(
        self,
        room: RoomId,
        request: Request,
        sender: Incarnation,
        now_ms: int,
        *,
        ends_ms: int | None = None,
        peer_name: str = "",
        compiled: bool = True,
        opener: Opener = NO_OPENER,
    ) -> R:
        """Add a room that the bootstrap opened on this worker. Return its record. Raises Refusal."""
        division = ChoicePages(
            request.prefill_tokens,
            request.tokens_max,
            request.choices,
            self.layout.page_tokens,
            self.layout.states,
        )
        if any(map(gt, division.needed, self.holdings.sizes)):
            each = "" if request.choices == 1 else f" in each of {request.choices} choices"
            raise Refusal(
                f"request may grow to {request.tokens_max} tokens{each}: the cache of this worker never holds"
                " it"
            )

        opened = self._enter(
            room,
            request,
            sender,
            division.first,
            now_ms,
            ends_ms=ends_ms,
            peer_name=peer_name,
            compiled=compiled,
            opener=opener,
            pages_expected=self.layout.pages_for(request.prefill_tokens),
            division=division,
        )
        self._report(opened, Moment.ACCEPTED, f"{counted(sum(division.needed), 'page')} needed")
        if sender == NO_PEER:
            self._claim(opened, "it came without a prefill worker")
        else:
            self._ask(Connect(room, sender))
        return opened

    def compute_here(self, room: RoomId, beside_tokens: int, near_tokens: int, why: str) -> None:
        """Compute a room's prompt on this decode worker, because the worker's leader rank decided so
        (`mine-or-granted`).

        `beside_tokens`, `near_tokens`: new limits on the prompt tokens of a step (see the attributes). A room
        that is already granted or over is not changed.
        """
        self.beside_tokens, self.near_tokens = beside_tokens, near_tokens
        if room in self.roster and self._claim(self.roster.get(room), why):
            self._ask(ClaimRoom(room, self.roster.get(room).peer))

    def connected(self, sender: Incarnation) -> None:
        """Record that a sender has connected to this worker's memory, for all rooms that it sends."""
        for room in self.roster:
            if room.peer == sender:
                room.note(Connected())

    def cut(self, room: RoomId, choice: int, opener: Opener = NO_OPENER) -> None:
        """End one choice of a room, because the caller wants no more of its tokens. Does nothing if the room
        is over, or for another router (`opener-owns`)."""
        if room not in self.roster or self.roster.is_foreign(room, opener):
            return
        found = self.roster.get(room)
        found.ends.cut.add(choice)
        if choice in found.ends.going_on and not found.concluded:
            self._end(found, choice, "cut off")

    def quiet(self, room: RoomId, generation: Generation) -> None:
        """Record that the sender has acknowledged a room's close: it writes nothing more for the room. Raises
        PeerFault if the acknowledgement names another generation."""
        if room in self.roster and self.roster.get(room).generation != generation:
            raise PeerFault(f"room {room}: quiet for generation {generation}, which is not ours")
        self.roster.note(room, Fenced(Proof.QUIET))

    def depart(self, sender: Incarnation) -> None:
        """Record that a prefill process is gone, so that none of its writes can land any more.

        A hand-over that it finished before is complete, and is not lost (`drain-keeps-promises`).
        """
        for room in self.roster:
            if room.peer != sender or room.phase is Phase.SUCCESS or room.local:
                continue
            if room.phase is Phase.TRANSFERRING and room.record is None:
                self.poll(room)
            if room.record is None:
                self.fail(room, Reason.PREFILL_LOST, f"prefill worker {room.peer_name} is gone")
            room.note(Fenced(Proof.DEAD))
        self._ask(Forget(sender))

    def revoke(self) -> None:
        """End every room whose memory is exposed, because all exposed memory is about to be moved out of
        senders' reach."""
        self.revoking = True
        for room in self.roster:
            if room.phase is Phase.TRANSFERRING:
                text = "decode: its memory was taken back from another sender"
                self.fail(room, Reason.MEMORY_REVOKED, text)

    # ---- what is known on this rank alone

    def stepping(self, now_ms: int) -> None:
        """Record that an engine step is running or has ended. It counts as progress for rooms whose prompts
        this worker computes, and postpones their deadlines."""
        for room in (each for each in self.roster if each.phase is Phase.COMPUTING):
            room.progressed(now_ms)

    def computed(self, room: R, tokens: int, first: Token | None) -> None:
        """Record how many leading tokens this worker has computed for a room whose prompt it computes itself.

        `first`: token sampled after the whole prompt, or None. Has no effect if the room has failed
        meanwhile.
        """
        if room.phase is not Phase.COMPUTING:
            return
        room.computed = tokens
        if first is not None:
            self._begin_output(room, first)
            room.note(Computed())

    def drawn(self, room: R, choice: int) -> FinishReason | None:
        """Record that a sampled token was appended to a choice's output. Return the finish reason if the
        choice ends with this token, or None."""
        room.filled[choice] = len(room.request.prompt) + len(room.outputs[choice]) - 1
        finish = room.request.finish_reason(room.outputs[choice])
        if finish is not None:
            self._end(room, choice, finish.value)
        return finish

    def revocation_due(self, now_ms: int, *, shut_out: bool) -> bool:
        """Return whether the leader should start a revocation now: take exposed memory back from all senders.
        Return True only once for each revocation.

        `shut_out`: whether some room's sender refuses to connect, because it has not seen the end of writes
        over a broken connection.
        """
        if not self.page_growth.lacks:
            self._lacks_since_ms = None
        elif self._lacks_since_ms is None:
            self._lacks_since_ms = now_ms
        if not self._asked_to_revoke:
            sizes, since_ms = self.holdings.sizes, self._lacks_since_ms
            due = revocation_due(self.roster, now_ms, sizes, lacks_since_ms=since_ms)
            self._asked_to_revoke = shut_out or due
            return self._asked_to_revoke
        return False

    def revoked(self, exposure: Incarnation, slots: memoryview) -> None:
        """Record that all exposed memory was moved and exposed under a new id, out of reach of all earlier
        senders.

        This is the proof for every room in quarantine that no write can still land. Admitted rooms have the
        same pages at another address. `exposure`: the new id. `slots`: memory of the metadata slots now.
        """
        self.holdings.slots.moved(slots)
        self._exposure = exposure
        for room in self.roster:
            if in_quarantine(room):
                room.note(Fenced(Proof.REVOKED))
        self.revoking = self._asked_to_revoke = False

    # ---- a turn

    def capacity(self) -> Capacity:
        """Return the numbers of pages and slots that new rooms could reserve now. They are 0 during a
        revocation. Otherwise pages for the growth of running rooms are left out (`memory-as-used`)."""
        if self.revoking:
            return NOTHING
        return super().capacity()._replace(margin=self.page_growth.margin, rows=self.page_growth.rows)

    def space_for(self, rows: Sequence[tuple[R, int, int]]) -> Space[R]:
        """Reserve the pages that the rows of the next decode step write to. Return which rows have their
        pages.

        If there are too few pages, rooms are retracted in the next turn, which is due at once. Call it only
        while no step runs on any rank. All ranks then have the same outputs, pages and counts, and decide
        alike (`growth-is-agreed`). `rows`: (room, choice, position at which the row ends), at least of all
        choices that lack pages.
        """
        space = self.page_growth.space_for(rows)
        for room in space.retracted:
            self._retract(room, space.wanted)
        return space

    def reach(self, room: R, choice: int, stop: int) -> DraftReach:
        """Return up to which position, at most `stop`, the draft tokens of a choice can be verified in the
        next step.

        Call it after `space_for`, under the same rules. Drafts take only pages that no running room may need
        next, and retract no room (`drafts-make-way`).
        """
        return self.page_growth.reach(room, choice, stop)

    def load(self, running_max: int, opener: Opener | None = None) -> WorkerLoad:
        """Return this worker's load, by which the router decides which rooms it gets. `running_max`: most
        sequences of a step. `opener`: the router, for the ids of its own rooms (see `entered`)."""
        nothing: PageCounts = (0,) * len(self.holdings.pools)
        needed, waiting, running = nothing, 0, 0
        for room in self.roster:
            if room.phase in (Phase.BOOTSTRAPPING, Phase.WAITING_FOR_INPUT):
                waiting += 1
                needed = tuple(map(sum, zip(needed, room.pages_needed, room.margin, strict=True)))
            elif room.phase in (Phase.TRANSFERRING, Phase.COMPUTING) or room.runs:
                running += len(room.ends.going_on)
        free = self.capacity().free or nothing
        entered, others = self.entered(opener), self.others(opener)
        return WorkerLoad(free, needed, waiting, running, running_max, entered, other_rooms=others)

    def agreed(self) -> None:
        """Send the grants that were made in the turn before. By now, every rank has exposed the granted
        memory."""
        for grant in self._granting:
            self._ask(grant)
        self._granting.clear()

    def perform(self, room: R, effect: Effect | ReceiverEffect, now_ms: int) -> None:
        match effect:
            case Effect.QUEUE:
                if not room.local:
                    self._report(room, Moment.CONNECTED)
            case ReceiverEffect.GRANT:
                self._grant(room)
            case ReceiverEffect.COMPUTE:
                self._compute(room)
            case ReceiverEffect.ADMIT:
                self._admit(room)
            case Effect.RELEASE:
                self._retire(room, now_ms)
            case Effect.STOP:
                self._distrust(room)
                self._end_early(room)
            case Effect.FENCE:
                self._distrust(room)
                self._fence(room)
            case _:
                assert_never(effect)

    def _claim(self, room: R, why: str) -> bool:
        """Record that this worker computes the room's prompt itself. Return False if the room is already
        granted, over or claimed.

        The result is the same on all ranks, even if only this rank has seen the room end. `why`: text for the
        timeline.
        """
        if not room.claim_local():
            return False
        self._report(room, Moment.LOCAL, why)
        return True

    # ---- what moves do

    def _grant(self, room: R) -> None:
        """Reserve and expose memory for a room, and make the grant for its sender.

        The grant waits until all ranks have done so. If a rank zeroed its slot after the sender wrote to it,
        the seal would be lost.
        """
        # With states the last token is always sent, and the state behind it.
        known = room.request.tokens[: -1 if self.layout.states else None]
        holding = self.holdings.take(room.id, room.pages_needed, known, room.request.salt)
        generation = holding.slot.generation
        room.expose(generation, holding.shared)
        self.holdings.expose(room.id, room.pages_expected)
        self.page_growth.granted(room)
        room.prefix_tokens = holding.shared_tokens
        grant = Grant(
            room.id,
            room.peer,
            self._exposure,
            generation,
            holding.exposed,
            holding.slot.index,
            room.prefix_tokens,
        )
        self._granting.append(grant)
        if self._ranks == 1:
            self.agreed()
        detail = (
            f"{counted(sum(map(len, holding.exposed)), 'page')} behind"
            f" {counted(room.prefix_tokens, 'token')} held,"
            f" slot {holding.slot.index}, generation {generation}"
        )
        self._report(room, Moment.GRANTED, detail)

    def _compute(self, room: R) -> None:
        """Reserve memory for a room whose prompt this worker computes itself. No peer learns of the memory.

        The last token is always computed, because the next token is sampled from it. With states all tokens
        are, because states are stored on prefill only.
        """
        known = () if self.layout.states else room.request.tokens[:-1]
        holding = self.holdings.take(room.id, room.pages_needed, known, room.request.salt)
        room.prefix_tokens = room.computed = holding.shared_tokens
        self.page_growth.granted(room)
        detail = f"{counted(sum(map(len, holding.pages)), 'page')}, {counted(room.computed, 'token')} cached"
        self._report(room, Moment.COMPUTING, detail)

    def _begin_output(self, room: R, first: Token) -> None:
        room.first = first
        room.outputs[0][:] = [*room.request.output, first.id]

    def _admit(self, room: R) -> None:
        """Admit a room to decoding: commit its pages, and request to add its choices to the batch."""
        if room.first is None:
            raise AssertionError(f"room {room.id} was admitted without its first token")
        (self.holdings.own if room.local else self.holdings.commit)(room.id)
        self.holdings.keep(room.id, room.request.tokens)
        self.page_growth.begins(room)
        self._report(room, Moment.ADMITTED)
        if further := room.request.choices - 1:
            self._report(room, Moment.FORKED, counted(further, "further choice"))
        self._ask(Join(room.id))

    def _retract(self, room: R, wanted: int) -> None:
        """Retract (preempt) a room for its pages. Its request continues in another room, after the output so
        far (`retracted-is-no-failure`).

        `wanted`: number of pages that older rooms lack.
        """
        text = f"decode: its pages are needed by rooms that are older: {counted(wanted, 'page')} wanted"
        room.retracting = Cause(Reason.RETRACTED, text)
        drawn = counted(sum(map(len, room.outputs)), "token")
        self._report(room, Moment.RETRACTED, f"{drawn}, {counted(wanted, 'page')} wanted by those that run")

    def _end(self, room: R, choice: int, how: str) -> None:
        """End one choice of a room, and the room if it was the last choice (`choices-end-alone`). `how`: text
        of the reason, for the room's timeline."""
        last, several = room.ends.end(choice), room.request.choices > 1
        detail = f"{counted(len(room.outputs[choice]), 'token')}, {how}"
        if several:
            self._report(room, Moment.CHOICE_ENDED, f"choice {choice}: {detail}")
        if not last:
            return
        if several:
            drawn = counted(sum(map(len, room.outputs)), "token")
            detail = f"{counted(room.request.choices, 'choice')}, {drawn}"
        room.note(Finished())
        self._conclude(room, None)
        self._report(room, Moment.FINISHED, detail)

    def _end_early(self, room: R) -> None:
        """Send the caller the cause for which a room ends while some of its choices are unfinished."""
        if room.cause is None:
            raise AssertionError(f"room {room.id} ended early without a cause")
        if not room.finished:
            self._conclude(room, room.cause)

    def _conclude(self, room: R, cause: Cause | None) -> None:
        room.concluded = True
        self._ask(Outcome(room.id, cause))

    def _fence(self, room: R) -> None:
        self._end_early(room)
        self.page_growth.over(room)
        if not self.holdings.quarantine(room.id):
            room.note(Fenced(Proof.UNEXPOSED))
        elif room.generation is not None and room.proof is not Proof.DEAD:
            # A seal is proof on this rank only. The leader sends the close, and another rank may have seen
            # no seal. The death of a peer is known to all ranks.
            self._report(room, Moment.QUARANTINED, "until the sender is quiet or gone")
            doubtful = room.cause is not None and REASONS[room.cause.reason].fault is not Fault.CALLER
            self._ask(Close(room.id, room.peer, room.generation, doubtful))

    def _retire(self, room: R, now_ms: int) -> None:
        whole = room.finished and not room.stopping
        if (whole or room.ended_for is Reason.RETRACTED) and 0 not in room.ends.cut:
            # For a stopped or cut room, ranks may have seen different steps end. A retracted room was in no
            # step of any rank.
            self.holdings.keep(room.id, room.written)
        self.page_growth.over(room)
        self._release(room, now_ms)
