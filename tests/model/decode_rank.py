"""One rank of a decode worker in the model: the product's `ReceivingSide`, and the world around it.

The world: memory that writes land in, steps, what must not be read, and what the rank asks of others.
"""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from baton.handover.receiving_room import ReceivingRoom
from baton.handover.receiving_side import ReceivingSide
from baton.handover.requests import ClaimRoom, Close, Grant, Join, Outcome, SumPages
from baton.ids import Generation, Incarnation, PageTables, RoomId
from baton.pages.holding import Standing as Held
from baton.pages.holdings import Holdings
from baton.pages.kv_checksum import KvChecksum
from baton.pages.pool import PagePool
from baton.pages.prefix_tree import PrefixTree
from baton.pages.record import SEAL_BYTES, SEAL_OFFSET, SLOT_BYTES, seal_bytes
from baton.pages.slots import SlotPool
from baton.rooms.errors import PeerFault, Reason
from baton.rooms.evidence import Connected
from baton.rooms.phases import Effect, Phase, ReceiverEffect
from baton.rooms.quarantine import revocation_due
from baton.rooms.request import Request, Token
from tests.model.flights import PAGE, RECORD, SLOT, Flight, exposed_anew, exposure, leaders
from tests.model.laws import Broken, Law
from tests.model.rank import FAR, Done, Rank, Told
from tests.model.scopes import Scope
from tests.model.shapes import (
    FIRST_TOKEN,
    GROUP_PAGES,
    STOP_TOKEN,
    VOCABULARY,
    asked,
    content,
    layouts,
    page_key,
    page_keys,
    reserving,
    strips,
    told_sum,
)
from tests.model.space import BeforeStep, check_wait, free, growing, pages_of, reach
from tests.model.standing import Place, Standing

_DRAWN, _CHOICES_MAX, _DRAWN_MAX = 128, 3, 8
"""First drawn token, most choices of a room and most tokens of each. A token encodes its place. No prompt
has these."""
_NOT_TAKEN = 255
"""Token of a wrong draft."""
PROMPT: Final = -1
"""Stands for a choice in a step that computes a part of the room's prompt."""
CLAIM: Final = ("claim",)
_LATE_MS = 1 << 50
"""Time by which every proof is overdue, in milliseconds."""


@dataclass(slots=True, eq=False)
class WatchedRoom(ReceivingRoom):
    enough: frozenset[int] = field(default=frozenset(), init=False)
    """Choices that the world has said are enough."""
    answered: bool = field(default=False, init=False)
    """Whether its opener was sent all tokens and the outcome."""
    told: Incarnation | None = field(default=None, init=False)
    """Exposure by which the sender knows the memory."""

    def steps(self, choice: int) -> int:
        """Return the ended steps of this choice that counted. The sender drew the first token of choice 0."""
        return len(self.outputs[choice]) - (choice == 0)


class DecodeRank(Rank[WatchedRoom]):
    SEES = Reason.TRANSFER_FAILED

    def __init__(self, scope: Scope, incarnation: Incarnation, rank: int) -> None:
        ranks = layouts(scope, 1)
        super().__init__(len(ranks), adopts=scope.adopts)
        self._ends_ms = FAR.success_ms if scope.timed else None
        self._scope = scope
        self._strips, *self._state_strips = strips(ranks[rank])
        """Strips of each page, and of each state."""
        self._sum = told_sum(ranks[rank].heads) if scope.sums else 0
        """Checksum that the record has to have."""
        self._exposure = exposure(incarnation, 1, rank)
        self._reached_by = {self._exposure}
        """Exposures by which writes still reach what is read here."""
        self._lasts = [scope.tokens + choice % 2 for choice in range(scope.choices)]
        """Steps of each choice."""
        self._slot_memory = bytearray(scope.slots * SLOT_BYTES)
        self._kv = bytearray((scope.pages + scope.states) * len(self._strips))
        """Content of each strip since its page was taken, states behind pages. 0: nothing was written."""
        self._slot_writers: dict[int, int] = {}
        """Rank of the sender that wrote to a slot since it was handed out."""
        self.side: ReceivingSide[WatchedRoom] = ReceivingSide(
            WatchedRoom,
            scope.rooms,
            Holdings(
                [PagePool(scope.pages), *[PagePool(scope.states)] * bool(scope.states)],
                SlotPool(memoryview(self._slot_memory)),
                PrefixTree((1,)) if scope.cached else None,
            ),
            reserving(scope, ranks[rank]),
            FAR,
            exposure=self._exposure,
            # (Where no rank is late, to wait for the others makes no difference but one more turn.)
            ranks=len(ranks) if scope.budget.lags else 1,
            vocabulary=VOCABULARY,
            checksum=KvChecksum.PAGES if scope.sums else KvChecksum.RECORD,
        )
        self._at_first = self.side.capacity()
        """Capacity for rooms at the start."""
        self._gone: set[Incarnation] = set()
        """Prefill workers known to be gone: nobody connects to them any more."""

    # ---- commands, the same on every rank

    def _asked(self, room: RoomId) -> Request:
        return asked(self._scope, room)

    def _entered(self, room: WatchedRoom, connected: bool = True) -> None:
        """`connected`: the sender knows this memory; else `connected` will tell."""
        if room.peer in self._gone:
            self.side.fail(room, Reason.CONNECT_FAILED, "its process is gone")
        elif connected:
            self.side.note(room.id, Connected())

    def connected(self, peer: Incarnation) -> str:
        self.side.connected(peer)
        return ""

    def end_choice(self, room: RoomId, choice: int) -> str:
        if room in self._roster:
            self._roster.get(room).enough |= {choice}
        self.side.cut(room, choice)
        self._carry_out()
        return ""

    def compute_here(self, room: RoomId) -> str:
        """Let decode compute the room's prompt itself. Returns an empty text, or "claimed" if the sender has
        to be told."""
        self.side.compute_here(room, 1, 1, "")
        return "claimed" if any(facts == CLAIM for _, facts in self._carry_out()) else ""

    def quiet(self, room: RoomId, generation: Generation) -> str:
        try:
            self.side.quiet(room, generation)
        except PeerFault as error:
            return type(error).__name__
        return ""

    def depart(self, peer: Incarnation) -> str:
        self._gone.add(peer)
        with self._unharmed("its sender"):
            return super().depart(peer)

    def revoke(self) -> str:
        with self._unharmed("what was exposed"):
            self.side.revoke()
        return ""

    @contextmanager
    def _unharmed(self, other: str) -> Iterator[None]:
        """Check that a local computation ends with no page that it does not need."""
        mine = [room for room in self._roster if room.local and room.cause is None]
        yield
        for room in mine:
            if room.cause is not None:
                raise Broken(Law.MINE_OR_GRANTED, f"room {room.id} is computed here, and ends with {other}")

    # ---- what happens to this rank alone

    def land(self, flight: Flight) -> str:
        if flight.peer not in self._reached_by:
            return ""
        if flight.kind == PAGE:
            self._land_pages(flight)
            return ""
        (slot,) = flight.targets
        if self._slot_writers.setdefault(slot, flight.by) != flight.by:
            raise Broken(Law.ONE_WRITER, f"two ranks write the record of room {flight.room} to slot {slot}")
        start = slot * SLOT_BYTES + (0 if flight.kind == RECORD else SEAL_OFFSET)
        self._slot_memory[start : start + len(flight.body)] = flight.body
        return ""

    def _land_pages(self, flight: Flight) -> None:
        exposed = self._holdings.get(flight.room).exposed if flight.room in self._holdings else ()
        right = self._right_strips(flight.room, exposed)
        for page, strip, content_there in flight.strips:
            at = self._at(page) + strip
            if content_there != right.get((page, strip), content_there):
                raise Broken(
                    Law.LAYERS_BY_ID, f"room {flight.room}: another layer's or head's bytes go to page {page}"
                )
            if self._kv[at] == content_there:
                raise Broken(Law.ONE_WRITER, f"room {flight.room}: bytes of page {page} are written twice")
            self._kv[at] = content_there

    def _expected(self, room: RoomId, page: int, strip: int) -> int:
        return content(room, page, self._strips[strip])

    def _at(self, page: int) -> int:
        """Return where the strips of a page lie. `page`: its number among those of all KV groups."""
        group, page = divmod(page, GROUP_PAGES)
        return (page + group * self._scope.pages) * len(self._strips)

    def _right_strips(self, room: RoomId, tables: PageTables) -> dict[tuple[int, int], int]:
        """Return the right content of each strip of the pages in `tables`, by page and strip."""
        by_group = zip(tables, (self._strips, *self._state_strips), strict=False)
        return {
            (page_key(group, page), place): content(room, index, strip)
            for group, (table, strips) in enumerate(by_group)
            for index, page in enumerate(table)
            for place, strip in enumerate(strips)
        }

    def step_ends(self) -> str:
        """End the step: every sequence of the batch draws a token."""
        step, self._step = self._step, []
        for room, choice, drafts in step:
            held = self._roster.get(room)
            held.busy = False
            if choice == PROMPT:
                self._compute_prompt(held)
                continue
            if self._scope.grows:
                self._read(held, choice)
                self._write(held, choice, drafts)
            for _ in range(1 + self._right(held, choice, drafts)):
                if choice in held.ends.going_on and not held.stopping:
                    last = held.steps(choice) + 1 == self._lasts[choice]
                    held.outputs[choice].append(STOP_TOKEN if last else FIRST_TOKEN)
                    self.side.drawn(held, choice)
        self._carry_out()
        return ""

    # ---- a turn

    def _observe(self) -> None:
        for room in self.side.touched():
            self.side.poll(room)

    def _agreed(self, connects: int) -> tuple[tuple[str, ...], list[Done]]:
        self.side.agreed()
        return (), [(room, ReceiverEffect.GRANT, facts) for room, facts in self._carry_out()]

    def _do(self, request: Any) -> list[tuple[RoomId, Told]]:
        match request:
            case Grant(room, _, by, generation, pages, slot):
                return [(room, ("grant", leaders(by), generation, pages, slot))]
            case ClaimRoom(room):
                return [(room, CLAIM)]
            case Close(room, _, generation, doubtful):
                return [(room, ("close", generation, doubtful))]
            case SumPages(room):
                self.side.summed(self._roster.get(room), self._sum)
            case Outcome(room, cause) if cause is not None and cause.reason is Reason.RETRACTED:
                if (ended_for := self._roster.get(room).ended_for) is not cause.reason:
                    text = f"room {room} ends for {ended_for}, and its caller hears of a retraction"
                    raise Broken(Law.RETRACTED_IS_NO_FAILURE, text)
            case Outcome(room, None):
                self._roster.get(room).answered = True
            case Join(room):
                held = self._roster.get(room)
                if 0 in held.ends.going_on:
                    self.side.drawn(held, 0)
            case _:
                pass
        return []

    def _perform(self, room: WatchedRoom, effect: Effect | ReceiverEffect) -> Told:
        if effect is ReceiverEffect.ADMIT and room.record is None and not room.local:
            raise Broken(Law.GATE_BEFORE_AGREE, f"room {room.id} is admitted without its record")
        if effect is Effect.RELEASE:
            self._check_release(room)
            was = bytes(self._kv), self._holdings.get(room.id).pages if room.id in self._holdings else ()
            self._blank(room)
        if effect is Effect.FENCE and self._scope.timed:
            check_wait(room)
        grew = growing(self._roster)
        self.side.perform(room, effect, 0)
        if effect is Effect.RELEASE:
            self._check_kept(room, *was)
        if effect in (ReceiverEffect.GRANT, ReceiverEffect.COMPUTE):
            self._check_margin(room, grew)
            self._blank(room)
        if effect is ReceiverEffect.GRANT:
            room.told = self._exposure
            slot = self._holdings.get(room.id).slot
            if any(self._holdings.slots.view(slot)):
                raise Broken(Law.SLOT_ZERO, f"slot {slot.index} is handed to room {room.id} written")
        return next((facts for _, facts in self._carry_out()), ())

    def _blank(self, room: WatchedRoom) -> None:
        """Forget the content of memory that has changed hands."""
        if room.id not in self._holdings:
            return
        holding, size = self._holdings.get(room.id), len(self._strips)
        for page in (*pages_of(self._holdings, room), *page_keys(((), *holding.pages[1:]))):
            self._kv[self._at(page) : self._at(page) + size] = bytes(size)
        self._slot_writers.pop(holding.slot.index, None)

    def _take_memory_back(self) -> None:
        if self._step:
            raise Broken(Law.APPLY_VERDICT, "memory is taken back under a running step")
        self._move()
        self.side.revoked(self._exposure, memoryview(self._slot_memory))

    def _move(self) -> None:
        """Move the memory like `baton.transfer.exposure`: its contents get another name. Writes by an older
        name land where nothing reads."""
        self._slot_memory = bytearray(self._slot_memory)
        self._kv = bytearray(self._kv)
        self._reached_by.clear()
        self._exposure = exposed_anew(self._exposure)
        self._reached_by.add(self._exposure)

    def _check_margin(self, room: WatchedRoom, grew: int) -> None:
        """Check that a new room does not drive out rooms that were there before it."""
        if self._scope.grows and free(self._holdings, self._roster) < grew:
            raise Broken(Law.MEMORY_AS_USED, f"room {room.id} is granted what those that run may need next")

    def _check_release(self, room: WatchedRoom) -> None:
        if room.cause is not None and room.proof is None and not room.local:
            raise Broken(Law.PROOF_NOT_TIME, f"room {room.id} gives its memory back without a proof")
        if any(each == room.id for each, _, _ in self._step):
            raise Broken(Law.EXITS_RELEASE_ALL, f"room {room.id} is released under a running step")
        if room.finished and not room.stopping:
            self._check_ends(room)

    def _compute(self) -> None:
        if self.side.revoking:
            self._take_memory_back()
            return
        rows = [
            (room, choice, self._known(room, choice))
            for room in self._roster
            if room.runs
            for choice in room.ends.going_on
        ]
        before = BeforeStep(self.side, rows)
        space = self.side.space_for(rows)
        self._carry_out()
        if self._scope.grows:
            before.check(space)
        for room, choice, stop in [rows[at] for at in space.computed]:
            room.busy = True
            drafts = reach(self.side, room, choice, stop, self._scope.drafts)
            self._step.append((room.id, choice, drafts))
            if self._scope.grows:
                self._begin(room, choice, drafts)
        for room in self._roster:
            if room.computable:
                room.busy = True
                self._step.append((room.id, PROMPT, 0))
        if not (self._scope.steps or self._scope.receiver_steps):
            self.step_ends()

    # ---- what steps read and write

    def _right(self, room: WatchedRoom, choice: int, drafts: int) -> int:
        """Return how many of a row's drafts are right."""
        return (room.id + choice + self._known(room, choice)) % (drafts + 1)

    def _begin(self, room: WatchedRoom, choice: int, drafts: int) -> None:
        """Begin a step that computes the choice's next token and the drafts behind it."""
        if room.steps(choice) >= self._lasts[choice] or choice in room.enough:
            raise Broken(
                Law.CHOICES_END_ALONE, f"choice {choice} of room {room.id} has ended, and is drawn on"
            )
        tables = [room.tables(each)[0] for each in range(self._scope.choices)]
        known = self._known(room, choice)
        for position in range(room.filled[choice], known + drafts):
            if len(tables[choice]) <= position:
                law = Law.CHOICES_APART if position < known else Law.DRAFTS_MAKE_WAY
                raise Broken(law, f"choice {choice} has no page for token {position}")
            page = tables[choice][position]
            for other, table in enumerate(tables):
                if other != choice and page in table:
                    raise Broken(
                        Law.CHOICES_APART, f"choice {choice} writes to page {page}, as {other} reads"
                    )
        self._read(room, choice)
        if room.filled[choice] >= known:
            law = Law.CHOICES_APART if choice else Law.NOT_TAKEN_NEVER_READ
            raise Broken(law, f"choice {choice} of room {room.id} draws, and computes no token for that")

    def _compute_prompt(self, room: WatchedRoom) -> None:
        """A step has computed the next token of a local room's prompt."""
        at, size, last = room.computed, len(self._strips), self._scope.prompt_pages
        if room.id in self._holdings:
            full, *states = self._holdings.get(room.id).pages
            for strip in range(size):
                self._kv[full[at] * size + strip] = self._expected(room.id, at, strip)
            for (page, strip), state in self._right_strips(room.id, ((), *states)).items():
                self._kv[self._at(page) + strip] = state
        self.side.computed(room, at + 1, Token(FIRST_TOKEN) if at + 1 == last else None)

    def _known(self, room: WatchedRoom, choice: int) -> int:
        """Tokens, of which its next step computes those that are not filled."""
        return self._scope.prompt_pages + len(room.outputs[choice])

    def _read(self, room: WatchedRoom, choice: int) -> None:
        (table,) = room.tables(choice)
        for position in range(room.filled[choice]):
            self._check_token(self._kv, table[position], room, choice, position)

    def _check_token(
        self, kv: Sequence[int], page: int, room: WatchedRoom, choice: int, position: int
    ) -> None:
        size = len(self._strips)
        for strip in range(size):
            there = kv[page * size + strip]
            if there == _NOT_TAKEN:
                text = f"a draft that was not taken is token {position} of choice {choice} of room {room.id}"
                raise Broken(Law.NOT_TAKEN_NEVER_READ, text)
            if there != self._drawn(room, choice, position, strip):
                text = f"choice {choice} of room {room.id} reads another's token {position}"
                prompt = position < self._scope.prompt_pages
                raise Broken(Law.STALE_NEVER_SERVED if prompt else Law.CHOICES_APART, text)

    def _write(self, room: WatchedRoom, choice: int, drafts: int) -> None:
        """The row's tokens, and its drafts."""
        (table,), size, known = room.tables(choice), len(self._strips), self._known(room, choice)
        taken = self._right(room, choice, drafts)
        for position in range(room.filled[choice], known + drafts):
            for strip in range(size):
                right = position < known + taken
                written = self._drawn(room, choice, position, strip) if right else _NOT_TAKEN
                self._kv[table[position] * size + strip] = written

    def _check_kept(self, room: WatchedRoom, kv: bytes, tables: PageTables) -> None:
        """Check that cached pages have the right content once they have left `tables`."""
        kept = self._holdings.prefixes.match(room.written) if self._scope.grows and self._scope.cached else ()
        for table in tables if room.first is not None else ():
            for position, page in enumerate(table[: len(kept)]):
                self._check_token(kv, page, room, 0, position)

    def _drawn(self, room: WatchedRoom, choice: int, position: int, strip: int) -> int:
        """Return the content of a strip of a drawn token. Choices differ in what they have drawn."""
        if position < self._scope.prompt_pages:
            return self._expected(room.id, position, strip)
        sequence = (room.id - 1) * _CHOICES_MAX + choice
        return _DRAWN + sequence * _DRAWN_MAX + position - self._scope.prompt_pages

    def _check_ends(self, room: WatchedRoom) -> None:
        """Check a room that is answered."""
        for choice, lasts in enumerate(self._lasts):
            if room.steps(choice) < lasts and choice not in room.enough:
                text = f"room {room.id} is answered, and its choice {choice} has not ended"
                raise Broken(Law.CHOICES_END_ALONE, text)

    # ---- what it is

    def nothing_held(self) -> bool:
        """Check that nothing is held, and nothing is left of rooms that are gone."""
        now = self.side.capacity()
        kept = (now.margin, now.rows) == (self._at_first.margin, self._at_first.rows)
        return super().nothing_held() and (kept or self.side.revoking)

    def standing(self) -> Standing:
        rooms, told = list(self._roster), super().standing()
        held: dict[Place, tuple[RoomId, int, bool]] = {}
        sealed: set[RoomId] = set()
        landed: set[RoomId] = set()
        for room in rooms:
            if room.id not in self._holdings:
                continue
            holding = self._holdings.get(room.id)
            open_to_peer = holding.standing in (Held.EXPOSED, Held.QUARANTINED)
            exposed = holding.pages if holding.standing is Held.QUARANTINED else holding.exposed
            generation, open_pages = holding.slot.generation, page_keys(exposed)
            for page in (*pages_of(self._holdings, room), *page_keys(((), *holding.pages[1:]))):
                held[PAGE, page] = (room.id, generation, open_to_peer and page in open_pages)
            held[SLOT, holding.slot.index] = (room.id, generation, open_to_peer)
            if self._seal_there(room.id, holding.slot.index, generation):
                sealed.add(room.id)
                if self._pages_there(room.id, exposed):
                    landed.add(room.id)
            if room.local:
                if open_to_peer:
                    raise Broken(Law.MINE_OR_GRANTED, f"room {room.id} is computed here, and exposed")
                prompt = holding.pages[0][: self._scope.prompt_pages]
                if self._pages_there(room.id, (prompt, *holding.pages[1:])):
                    landed.add(room.id)
            if holding.standing is Held.EXPOSED and room.told != self._exposure:
                text = f"room {room.id} waits for writes by an exposure that was taken back"
                raise Broken(Law.EXPOSURE_ON_PAGE, text)
        self._check_memory(held, landed)
        tables = [(room.id, pages_of(self._holdings, room), room.retracting is not None) for room in rooms]
        return replace(
            told,
            tables=tables,
            exposure=self._exposure,
            reached_by=frozenset(self._reached_by),
            revoking=self.side.revoking,
            overdue=revocation_due(rooms, _LATE_MS, self._holdings.sizes),
            held=held,
            local=frozenset(room.id for room in rooms if room.local),
            answered=frozenset(room.id for room in rooms if room.answered),
            sealed=frozenset(sealed),
            landed=frozenset(landed),
        )

    def _seal_there(self, room: RoomId, slot: int, generation: Generation) -> bool:
        seal = slot * SLOT_BYTES + SEAL_OFFSET
        return bytes(self._slot_memory[seal : seal + SEAL_BYTES]) == seal_bytes(room, generation)

    def _pages_there(self, room: RoomId, tables: PageTables) -> bool:
        right = self._right_strips(room, tables)
        return all(self._kv[self._at(page) + strip] == there for (page, strip), there in right.items())

    def _check_memory(self, held: Container[Place], landed: Container[RoomId]) -> None:
        for index in range(len(self._holdings.slots)):
            bytes_there = self._slot_memory[index * SLOT_BYTES : (index + 1) * SLOT_BYTES]
            if (SLOT, index) not in held and any(bytes_there):
                raise Broken(Law.SLOT_ZERO, f"slot {index} belongs to nobody and is not blank")
        for room in self._roster:
            if room.phase is Phase.SUCCESS and room.id not in landed:
                raise Broken(
                    Law.STALE_NEVER_SERVED, f"room {room.id} decodes from bytes that are not its own"
                )
