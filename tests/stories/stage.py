"""A simulated world around the product's hand-over logic, for stories with several ranks on each side.

The ranks are the product's own, `baton.handover`. The world has the turns that the ranks take together,
memory, and a remote writer. The writer writes to the memory it was once told of, whatever has happened to
that memory since."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from baton.handover.handover_side import HandOverSide
from baton.handover.receiving_room import ReceivingRoom
from baton.handover.receiving_side import ReceivingSide
from baton.handover.requests import Grant
from baton.handover.sending_room import SendingRoom
from baton.handover.sending_side import SendingSide
from baton.ids import Generation, Incarnation, RoomId
from baton.pages.holding import Standing
from baton.pages.holdings import Holdings
from baton.pages.kv_checksum import KvChecksum
from baton.pages.pool import PagePool
from baton.pages.prefix_tree import PrefixTree
from baton.pages.record import SEAL_OFFSET, SLOT_BYTES, MetadataRecord, seal_bytes
from baton.pages.slots import SlotPool
from baton.rooms.request import Request, Token
from tests.layouts import group_of, one_group
from tests.rooms.group import RosterGroup, Settled, deadlines

PLACES: Final = 4
LAYOUT: Final = one_group("model", "float32", 4, (0,), (0,), 1)
VOCABULARY: Final = 100
FIRST_TOKEN: Final = Token(5)
END: Final = 2
"""The token that ends a sequence."""
DEADLINE_MS: Final = 40
EXPOSURE: Final = 1

S = TypeVar("S", bound=HandOverSide[Any, Any])


def request(room: int, pages: int, prompt_pages: int, *, choices: int = 1, like: int = 0) -> Request:
    """Return a request whose prompt nearly fills `prompt_pages`, and each of whose choices may grow to
    `pages`. `like`: number of a shared prompt, which consists of whole pages."""
    tokens = max(prompt_pages * group_of(LAYOUT).page_tokens - (0 if like else 2), 0)
    most = pages * group_of(LAYOUT).page_tokens - tokens + 1
    prompt = ((like or room) % VOCABULARY,) * tokens
    return Request(
        f"request-{room}", prompt, most, eos_token_ids=(END,), further_seeds=tuple(range(1, choices))
    )


@dataclass(slots=True)
class RankMemory:
    """The memory of one rank. `kv` has one byte per page: the room that wrote it last, 0 for none."""

    kv: bytearray
    slots: bytearray

    @classmethod
    def of(cls, pages: int, slots: int) -> "RankMemory":
        return cls(bytearray(pages), bytearray(slots * SLOT_BYTES))

    def holdings(self, prefixes: str) -> Holdings:
        """`prefixes`: on to keep what rooms computed."""
        tree = PrefixTree(LAYOUT.page_tokens) if prefixes == "on" else None
        return Holdings([PagePool(len(self.kv))], SlotPool(memoryview(self.slots)), tree)


@dataclass(frozen=True, slots=True)
class Destination:
    """A grant that a sender was told once, and may write to at any later time."""

    grant: Grant
    memory: RankMemory
    """The memory as it lay when the grant was told."""
    prompt_tokens: int


class Stage(Generic[S]):
    """The rank group of one worker, on one side of a hand-over."""

    def __init__(self, ranks: Sequence[S]) -> None:
        self.ranks = ranks
        self.group: RosterGroup[Any] = RosterGroup([each.roster for each in ranks])
        self.said: list[str] = []

    def turn(self, now_ms: int) -> Settled[Any]:
        self.observe()
        settled = self.group.turn(now_ms, [each.capacity() for each in self.ranks], self.agreed)
        for rank, effects in enumerate(settled.effects):
            for room, effect in effects:
                try:
                    self.ranks[rank].perform(room, effect, now_ms)
                except AssertionError as error:
                    self.said.append(f"r{rank}  {error}")
        return settled

    def observe(self) -> None:
        """Let each rank collect its own evidence."""

    def agreed(self) -> None:
        """Act after the ranks have agreed."""

    def take_requests(self) -> Iterator[Any]:
        """Carry out the ranks' requests as far as this world does, and yield them."""
        for rank, each in enumerate(self.ranks):
            for asked in each.take_requests():
                self.carry_out(rank, asked)
                yield asked

    def carry_out(self, rank: int, asked: Any) -> None:
        """Carry out one request of a rank, as far as this world does."""

    def foreign_pages(self, rank: int) -> int:
        """Return the number of pages of the rank's rooms that another room has written to since."""
        return 0


class DecodeStage(Stage[ReceivingSide[ReceivingRoom]]):
    def __init__(
        self, ranks: int, pages: int, slots: int, *, prefixes: str = "off", checksum: str = "record"
    ) -> None:
        self.memories = [RankMemory.of(pages, slots) for _ in range(ranks)]
        self.exposure = Incarnation(EXPOSURE)
        self.told: dict[tuple[int, RoomId], Destination] = {}
        """Grants that the sender was told, by rank and room."""
        receivings = [
            ReceivingSide(
                ReceivingRoom,
                PLACES,
                memory.holdings(prefixes),
                LAYOUT,
                deadlines(DEADLINE_MS),
                exposure=self.exposure,
                ranks=ranks,
                vocabulary=VOCABULARY,
                checksum=KvChecksum(checksum),
            )
            for memory in self.memories
        ]
        super().__init__(receivings)

    def observe(self) -> None:
        for receiving in self.ranks:
            for room in receiving.touched():
                receiving.poll(room)

    def agreed(self) -> None:
        for receiving in self.ranks:
            receiving.agreed()

    def carry_out(self, rank: int, asked: Any) -> None:
        roster = self.ranks[rank].roster
        if isinstance(asked, Grant) and asked.room in roster:
            known = roster.get(asked.room).request.prefill_tokens
            self.told[rank, asked.room] = Destination(asked, self.memories[rank], known)
            for page in asked.pages[0]:
                self.memories[rank].kv[page] = 0

    def write(self, room: RoomId, rank: int, pages: int) -> None:
        """Write the room's first `pages` pages as the sender's one-sided write does."""
        to = self.told[rank, room]
        for page in to.grant.pages[0][:pages]:
            to.memory.kv[page] = room

    def record(self, room: RoomId, rank: int, words: Mapping[str, str]) -> None:
        """The sender's record, with what `words` say of it in place of what it should."""
        to = self.told[rank, room]
        record = MetadataRecord(
            room,
            to.grant.generation,
            prompt_tokens=int(words.get("tokens", to.prompt_tokens)),
            cached_tokens=0,
            pages=(int(words["pages"]),),
            first_token=int(words.get("token", FIRST_TOKEN.id)),
            pages_checksum=1,
        )
        packed = bytearray(record.pack())
        packed[36] ^= int(words.get("damaged", 0))
        self._put(to, 0, packed)

    def seal(self, room: RoomId, rank: int, generation: int) -> None:
        """The sender's seal; `generation`: 0 for its own."""
        to = self.told[rank, room]
        self._put(to, SEAL_OFFSET, seal_bytes(room, Generation(generation or to.grant.generation)))

    @staticmethod
    def _put(to: Destination, offset: int, data: bytes | bytearray) -> None:
        start = to.grant.slot * SLOT_BYTES + offset
        to.memory.slots[start : start + len(data)] = data

    def revoke(self, *, agreed_only: bool) -> None:
        """Revoke all exposed memory. It goes on at another address."""
        for receiving in self.ranks:
            receiving.revoke()
        if agreed_only:
            return
        self.exposure = Incarnation(self.exposure + 1)
        for rank, receiving in enumerate(self.ranks):
            memory = self.memories[rank]
            self.memories[rank] = RankMemory(bytearray(memory.kv), bytearray(memory.slots))
            receiving.revoked(self.exposure, memoryview(self.memories[rank].slots))

    def draw(self, rank: int, room: RoomId, choice: int, token: int) -> None:
        """Note that a step has drawn a token of this choice."""
        held = self.ranks[rank].roster.get(room)
        held.outputs[choice].append(token)
        self.ranks[rank].drawn(held, choice)

    def space(self, rank: int) -> str:
        """Make space before a step in which each unfinished choice is computed to its last token. Returns a
        line that says which are computed."""
        receiving = self.ranks[rank]
        rows = [
            (room, choice, len(room.request.prompt) + len(room.outputs[choice]))
            for room in receiving.roster
            if room.runs
            for choice in room.ends.going_on
        ]
        computed = receiving.space_for(rows).computed
        told = [
            f"{room.id}/{choice} {'' if at in computed else 'not '}computed"
            for at, (room, choice, _) in enumerate(rows)
        ]
        return ", ".join(told) or "nothing to compute"

    def finish(self, rank: int, room: RoomId) -> None:
        """End the sequences that have not ended."""
        roster = self.ranks[rank].roster
        for choice in list(roster.get(room).ends.going_on) if room in roster else ():
            self.draw(rank, room, choice, END)

    def foreign_pages(self, rank: int) -> int:
        holdings = self.ranks[rank].holdings
        return sum(
            self.memories[rank].kv[page] not in (0, room)
            for of, room in self.told
            if of == rank and room in holdings
            if holdings.get(room).standing is not Standing.QUARANTINED
            for page in holdings.get(room).pages[0]
        )


@dataclass(slots=True)
class StagedWrites:
    """Progress of the writes of one room from one rank."""

    failure: str | None = None
    written: bool = False
    sealed: bool = False


class PrefillStage(Stage[SendingSide[SendingRoom]]):
    def __init__(self, ranks: int, pages: int, slots: int, *, prefixes: str = "off") -> None:
        sendings = [
            SendingSide(
                SendingRoom,
                PLACES,
                RankMemory.of(pages, slots).holdings(prefixes),
                LAYOUT,
                deadlines(DEADLINE_MS),
                elected=rank == 0,
            )
            for rank in range(ranks)
        ]
        self.posted: set[tuple[int, RoomId]] = set()
        """Rooms with writes under way, as pairs of rank and room."""
        self.writes: dict[tuple[int, RoomId], StagedWrites] = {}
        super().__init__(sendings)

    def observe(self) -> None:
        for rank, sending in enumerate(self.ranks):
            for room in sending.unproven():
                if (rank, room.id) not in self.posted:
                    sending.ended(room)

    def compute(self, rank: int, room: RoomId, now_ms: int, tokens: int | None = None) -> None:
        """End a step that computed this many tokens of the room, or all of them."""
        held = self.ranks[rank].roster.get(room)
        known = held.request.prefill_tokens
        computed = known if tokens is None else tokens
        self.ranks[rank].computed(held, computed, FIRST_TOKEN if computed == known else None, now_ms)

    def see(self, rank: int, room: RoomId, now_ms: int, **writes: Any) -> None:
        """Let the rank see that the room's writes have come this far."""
        held = self.ranks[rank].roster.get(room)
        if "sealed" in writes and not held.elected:
            return
        if "written" in writes and not held.complete:
            self.compute(rank, room, now_ms)
        known = self.writes.setdefault((rank, room), StagedWrites())
        for word, value in writes.items():
            setattr(known, word, value)
        self.ranks[rank].observe(held, known, now_ms, moved=True)
