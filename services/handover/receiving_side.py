"""What does one rank of a decode worker do in a hand-over?

It grants memory to senders, knows what landed there, takes it for good or keeps it from everybody until
nothing more can be written to it. Commands, evidence and time come in; requests to the world go out
(`baton.handover.requests`). Pure: the workers, the model checker, the simulation and the stories drive
this very class.
"""

from collections.abc import Callable, Iterator, Sequence
from math import inf
from operator import gt
from typing import Final, TypeVar, assert_never

from baton.handover.handover_side import HandOverSide
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
    ReceiverRequest,
    SumPages,
)
from baton.ids import NO_PEER, Generation, Incarnation, PageCounts, RoomId
from baton.pages.errors import RecordCorrupt, RecordForeign, added
from baton.pages.holdings import Holdings
from baton.pages.kv_checksum import KvChecksum, nonzero_sum
from baton.pages.layout import KvLayout
from baton.pages.record import MetadataRecord, announced, read_slot
from baton.pages.slots import Slot
from baton.rooms.choice_pages import ChoicePages
from baton.rooms.deadlines import Deadlines
from baton.rooms.errors import Cause, PeerFault, Reason, Refusal
from baton.rooms.evidence import Computed, Connected, Fenced, Finished, Landed, Proof, Sealed
from baton.rooms.phases import Effect, Phase, ReceiverEffect
from baton.rooms.plurals import counted
from baton.rooms.quarantine import in_quarantine, revocation_due
from baton.rooms.reasons import REASONS, Fault
from baton.rooms.request import FinishReason, Request, Token
from baton.rooms.roster import NOTHING, ROWS_MAX, Capacity
from baton.rooms.timeline import Moment
from baton.rooms.worker_load import WorkerLoad

NEAR_S: Final = 0.01
"""What comes between a record and its seal takes a few milliseconds mostly."""

R = TypeVar("R", bound=ReceivingRoom)


class ReceivingSide(HandOverSide[R, ReceiverRequest]):
    """Invariants:
    exposure-on-page    what is named to a peer is marked exposed before, on every rank
    no-free-under-write exposed memory is committed by its seal or waits in quarantine for a proof
    stale-never-served  what landed is used only if it is this tenancy's own, and whole
    """

    def __init__(
        self,
        make: Callable[..., R],
        places: int,
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
        """`exposure`: of this rank's memory. `ranks`: of this worker. `vocabulary`: token ids that the model
        has. `near_s`: for how long a seal is near once its record is there. `running_max`: sequences that a
        step continues."""
        super().__init__(make, places, holdings, layout, deadlines)
        self.revoking = False
        """Agreed, and to be carried out as soon as no step runs: see `revoked`."""
        self._exposure = exposure
        self._ranks = ranks
        self._vocabulary = vocabulary
        self._checksum = checksum
        self._near_s = near_s
        self._granting: list[Grant] = []
        """Exposed here, and not yet known to be so on every rank."""
        self._asked_to_revoke = False
        self._lacks_since_ms: int | None = None
        """Since when somebody who runs has waited for pages without a break, as this rank's clock has it."""
        self._growing = PageGrowth(self.roster, holdings, layout, running_max)
        self.beside_tokens = self.near_tokens = layout.block_tokens
        """Of local rooms' prompts, that a step computes beside sequences that run, as told last; and while
        none runs, but what is handed over may soon."""

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
    ) -> R:
        """Enter a room that the registry opened. Raises Refusal."""
        division = ChoicePages(
            request.prefill_tokens,
            request.tokens_max,
            request.choices,
            self.layout.page_tokens,
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
        """The leader decided that this worker computes the room's prompt, of which a step has so many tokens
        from now on (`mine-or-granted`). Of a room that is granted by now, or over, nothing comes."""
        self.beside_tokens, self.near_tokens = beside_tokens, near_tokens
        if room in self.roster and self._claim(self.roster.get(room), why):
            self._ask(ClaimRoom(room, self.roster.get(room).peer))

    def connected(self, sender: Incarnation) -> None:
        """It knows this worker's memory."""
        for room in self.roster:
            if room.peer == sender:
                room.note(Connected())

    def cut(self, room: RoomId, choice: int) -> None:
        """The reader of one choice has all it wants of it. Of a room that is over nothing is to be ended."""
        if room not in self.roster:
            return
        held = self.roster.get(room)
        held.ends.cut.add(choice)
        if choice in held.ends.going_on and not held.concluded:
            self._end(held, choice, "cut off")

    def quiet(self, room: RoomId, generation: Generation) -> None:
        """The sender acknowledged the close of this room and generation. Raises PeerFault for another one."""
        if room in self.roster and self.roster.get(room).generation != generation:
            raise PeerFault(f"room {room}: quiet for generation {generation}, which is not ours")
        self.roster.note(room, Fenced(Proof.QUIET))

    def depart(self, sender: Incarnation) -> None:
        """A prefill process is known to be gone: nothing of it can land any more. What it finished before
        is there, and is not lost with it (`drain-keeps-promises`)."""
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
        """Every room whose memory is exposed ends: all of it is about to go."""
        self.revoking = True
        for room in self.roster:
            if room.phase is Phase.TRANSFERRING:
                text = "decode: its memory was taken back from another sender"
                self.fail(room, Reason.MEMORY_REVOKED, text)

    # ---- what is known on this rank alone

    def awaited(self) -> Iterator[tuple[R, Slot]]:
        """Rooms whose pages are on their way and whose seal was not seen, with their slots."""
        for room in self.roster:
            if room.phase is Phase.TRANSFERRING and room.record is None:
                yield room, self.holdings.get(room.id).slot

    def touched(self) -> list[R]:
        """Rooms whose seal may be there: `poll` says whether it is."""
        return [room for room, slot in self.awaited() if self.holdings.slots.is_touched(slot)]

    def near(self, now_s: float) -> bool:
        """A room has its record, and has not had it for long: its seal is near."""
        for room, slot in self.awaited():
            if room.near_until_s is None and announced(self.holdings.slots.view(slot)):
                room.near_until_s = now_s + self._near_s
            if room.near_until_s is not None and now_s < room.near_until_s:
                return True
        return False

    def poll(self, room: R) -> bool:
        """Look for the room's seal; True when something was there. What is not this tenancy's own ends the
        room (`stale-never-served`)."""
        slot = self.holdings.get(room.id).slot
        generation = slot.generation
        try:
            view, checked = self.holdings.slots.view(slot), self._checksum is not KvChecksum.OFF
            record = read_slot(view, room.id, generation, check_sum=checked)
            if record is None:
                return False
            self._check(room, record)
            room.note(Landed(generation, record.pages))
        except (RecordCorrupt, RecordForeign, PeerFault) as error:
            self.fail(room, Reason.RECORD_CORRUPT, f"decode: {error}")
            return True
        room.record = record
        self._begin_output(room, Token(record.first_token, record.first_logprob, record.alternatives))
        if self._checksum is KvChecksum.PAGES:
            self._ask(SumPages(room.id, room.prefix_tokens))
        else:
            self._seal(room, record)
        return True

    def stepping(self, now_ms: int) -> None:
        """A step goes on, or has ended: progress of all that are computed here, or wait for the next."""
        for room in (each for each in self.roster if each.phase is Phase.COMPUTING):
            room.progressed(now_ms)

    def computed(self, room: R, tokens: int, first: Token | None) -> None:
        """A step ended: the first `tokens` tokens of a local room are in its pages. `first`: the token that
        was drawn behind them all. Nothing follows where the room has failed meanwhile."""
        if room.phase is not Phase.COMPUTING:
            return
        room.computed = tokens
        if first is not None:
            self._begin_output(room, first)
            room.note(Computed())

    def summed(self, room: R, total: int) -> None:
        """The sum of what landed is complete."""
        record = room.record
        if record is None:
            raise AssertionError(f"room {room.id} was summed without its record")
        if record.pages_checksum == nonzero_sum(total):
            self._seal(room, record)
            return
        text = (
            f"decode: what landed in {added(record.pages)} pages of {record.prompt_tokens} tokens is not what"
            " the prefill worker computed"
        )
        self.fail(room, Reason.PAGES_CORRUPT, text)

    def drawn(self, room: R, choice: int) -> FinishReason | None:
        """A token was appended to the choice's output. Returns why it was the last one, if it was."""
        room.filled[choice] = len(room.request.prompt) + len(room.outputs[choice]) - 1
        finish = room.request.finish_reason(room.outputs[choice])
        if finish is not None:
            self._end(room, choice, finish.value)
        return finish

    def revocation_due(self, now_ms: int, *, shut_out: bool) -> bool:
        """Whether the leader is to ask for a revocation now; said once. `shut_out`: a sender that a room is
        for sees no end of what it wrote by a way that broke."""
        if not self._growing.lacks:
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
        """All memory was taken back from everyone who knew it, and is exposed anew. Proof for every room in
        quarantine; admitted rooms keep their pages, at another address. `slots`: where those lie now."""
        self.holdings.slots.moved(slots)
        self._exposure = exposure
        for room in self.roster:
            if in_quarantine(room):
                room.note(Fenced(Proof.REVOKED))
        self.revoking = self._asked_to_revoke = False

    # ---- a turn

    def capacity(self) -> Capacity:
        """Nothing while a revocation is agreed: it would be exposed, and taken back at once. Else what those
        that grow leave (`memory-as-used`)."""
        if self.revoking:
            return NOTHING
        return super().capacity()._replace(margin=self._growing.margin, rows=self._growing.rows)

    def space_for(self, rows: Sequence[tuple[R, int, int]]) -> Space[R]:
        """Give choices the pages that their rows of the next step write to; where there are none, rooms end,
        in the next turn, which is due at once. Only while no step runs on any rank: then all ranks have the
        same outputs, pages and counts, and decide alike (`growth-is-agreed`). `rows`: (room, choice,
        positions that it reaches to) of each, of those at least that lack pages."""
        space = self._growing.space_for(rows)
        for room in space.retracted:
            self._retract(room, space.wanted)
        return space

    def reach(self, room: R, choice: int, stop: int) -> DraftReach:
        """How far towards `stop` a choice's drafts are computed in the next step, whose rows have their pages
        by then. Drafts take only such as nobody who runs may need next, and retract nobody
        (`drafts-make-way`). On all ranks alike, as `space_for`."""
        return self._growing.reach(room, choice, stop)

    def load(self, running_max: int) -> WorkerLoad:
        """By what rooms are placed here. `running_max`: sequences that a step continues at most."""
        nothing: PageCounts = (0,) * len(self.holdings.pools)
        asked, waiting, running, entered = nothing, 0, 0, RoomId(0)
        for room in self.roster:
            entered = max(entered, room.id)
            if room.phase in (Phase.BOOTSTRAPPING, Phase.WAITING_FOR_INPUT):
                waiting += 1
                asked = tuple(map(sum, zip(asked, room.pages_needed, room.margin, strict=True)))
            elif room.phase in (Phase.TRANSFERRING, Phase.COMPUTING) or room.runs:
                running += len(room.ends.going_on)
        free = self.capacity().free or nothing
        return WorkerLoad(free, asked, waiting, running, running_max, entered)

    def agreed(self) -> None:
        """Every rank has done what the turn before asked of it: senders are told of their grants."""
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
        """Whether it becomes local, also where this rank alone has seen it end: all ranks answer alike."""
        if not room.claim_local():
            return False
        self._report(room, Moment.LOCAL, why)
        return True

    # ---- what moves do

    def _grant(self, room: R) -> None:
        """Reserve, expose, and only then tell: a slot that a late rank blanked after it was written would
        never be seen sealed."""
        holding = self.holdings.take(room.id, room.pages_needed, room.request.tokens, room.request.salt)
        generation = holding.slot.generation
        room.expose(generation, holding.shared)
        self.holdings.expose(room.id, room.pages_expected)
        self._growing.granted(room)
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
        """Reserve, and tell nobody. The last token is computed in any case: what follows is drawn from it."""
        known = room.request.tokens[:-1]
        holding = self.holdings.take(room.id, room.pages_needed, known, room.request.salt)
        room.prefix_tokens = room.computed = holding.shared_tokens
        self._growing.granted(room)
        told = f"{counted(sum(map(len, holding.pages)), 'page')}, {counted(room.computed, 'token')} cached"
        self._report(room, Moment.COMPUTING, told)

    def _begin_output(self, room: R, first: Token) -> None:
        room.first = first
        room.outputs[0][:] = [*room.request.output, first.id]

    def _admit(self, room: R) -> None:
        """The pages are the room's for good."""
        if room.first is None:
            raise AssertionError(f"room {room.id} was admitted without its first token")
        (self.holdings.own if room.local else self.holdings.commit)(room.id)
        self.holdings.keep(room.id, room.request.tokens)
        self._growing.begins(room)
        self._report(room, Moment.ADMITTED)
        if further := room.request.choices - 1:
            self._report(room, Moment.FORKED, counted(further, "further choice"))
        self._ask(Join(room.id))

    def _retract(self, room: R, wanted: int) -> None:
        """No failure (`retracted-is-no-failure`): its request goes on elsewhere, behind what was drawn."""
        text = f"decode: its pages are needed by rooms that are older: {counted(wanted, 'page')} wanted"
        room.retracting = Cause(Reason.RETRACTED, text)
        drawn = counted(sum(map(len, room.outputs)), "token")
        self._report(room, Moment.RETRACTED, f"{drawn}, {counted(wanted, 'page')} wanted by those that run")

    def _end(self, room: R, choice: int, how: str) -> None:
        """End one choice, and the room with the last of them (`choices-end-alone`)."""
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
        """The room ends before its choices did: its caller hears why, at once."""
        if room.cause is None:
            raise AssertionError(f"room {room.id} ended early without a cause")
        if not room.finished:
            self._conclude(room, room.cause)

    def _conclude(self, room: R, cause: Cause | None) -> None:
        room.concluded = True
        self._ask(Outcome(room.id, cause))

    def _fence(self, room: R) -> None:
        self._end_early(room)
        self._growing.over(room)
        if not self.holdings.quarantine(room.id):
            room.note(Fenced(Proof.UNEXPOSED))
        elif room.generation is not None and room.proof is not Proof.DEAD:
            # A seal that was seen proves it for this rank; the close is the leader's, and another rank may
            # have seen none. That a peer is dead is known to all.
            self._report(room, Moment.QUARANTINED, "until the sender is quiet or gone")
            doubtful = room.cause is not None and REASONS[room.cause.reason].fault is not Fault.CALLER
            self._ask(Close(room.id, room.peer, room.generation, doubtful))

    def _retire(self, room: R, now_ms: int) -> None:
        whole = room.finished and not room.stopping
        if (whole or room.ended_for is Reason.RETRACTED) and 0 not in room.ends.cut:
            # Of one that was stopped or cut, the ranks need not have seen the same steps end. One that was
            # retracted no rank was computing.
            self.holdings.keep(room.id, room.written)
        self._growing.over(room)
        self._release(room, now_ms)

    # ---- what landed

    def _seal(self, room: R, record: MetadataRecord) -> None:
        room.note(Sealed(Generation(record.generation)))
        checked = ", contents as computed" if self._checksum is KvChecksum.PAGES else ""
        detail = f"{counted(sum(record.pages), 'page')}, generation {record.generation}{checked}"
        self._report(room, Moment.LANDED, detail, of_rank=True)

    def _check(self, room: R, record: MetadataRecord) -> None:
        want = (room.request.prefill_tokens, room.pages_expected)
        if (record.prompt_tokens, record.pages) != want:
            raise RecordCorrupt(
                f"record of room {record.room} says {record.prompt_tokens} tokens in"
                f" {added(record.pages)} pages, expected {want[0]} in {added(want[1])}"
            )
        tokens = (record.first_token, *(token for token, _ in record.alternatives))
        if max(tokens) >= self._vocabulary:
            raise RecordCorrupt(f"record of room {record.room} names a token that the model does not have")
        logprobs = (record.first_logprob or 0.0, *(logprob for _, logprob in record.alternatives))
        if not all(each < inf for each in logprobs):
            raise RecordCorrupt(f"record of room {record.room} has a logprob that is no number")
