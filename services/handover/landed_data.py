"""Recognition and checks of data that senders wrote into a decode rank's memory: record, seal and page
sum."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from math import inf
from typing import TypeVar

from baton.handover.handover_side import HandOverSide
from baton.handover.receiving_room import ReceivingRoom
from baton.handover.requests import ReceiverRequest, SumPages
from baton.ids import Generation
from baton.pages.errors import RecordCorrupt, RecordForeign, added
from baton.pages.holdings import Holdings
from baton.pages.kv_checksum import KvChecksum, nonzero_sum
from baton.pages.layout import KvLayout
from baton.pages.record import MetadataRecord, announced, read_slot
from baton.pages.slots import Slot
from baton.rooms.deadlines import Deadlines
from baton.rooms.errors import PeerFault, Reason
from baton.rooms.evidence import Landed, Sealed
from baton.rooms.phases import Phase
from baton.rooms.plurals import counted
from baton.rooms.request import Token
from baton.rooms.timeline import Moment

R = TypeVar("R", bound=ReceivingRoom)


class LandedData(HandOverSide[R, ReceiverRequest]):
    """Part of `ReceivingSide` that reads the data which prefill workers wrote into this rank's memory."""

    def __init__(
        self,
        make: Callable[..., R],
        room_limit: int,
        holdings: Holdings,
        layout: KvLayout,
        deadlines: Deadlines,
        *,
        vocabulary: int,
        checksum: KvChecksum,
        near_s: float,
    ) -> None:
        super().__init__(make, room_limit, holdings, layout, deadlines)
        self._vocabulary = vocabulary
        self._checksum = checksum
        self._near_s = near_s

    def awaited(self) -> Iterator[tuple[R, Slot]]:
        """Yield each room in transfer whose seal (the mark that all data is written) has not been seen yet,
        with its metadata slot."""
        for room in self.roster:
            if room.phase is Phase.TRANSFERRING and room.record is None:
                yield room, self.holdings.get(room.id).slot

    def touched(self) -> list[R]:
        """Return the rooms whose metadata slot has bytes where the seal (the mark that all data is written)
        belongs. `poll` then checks the seal."""
        return [room for room, slot in self.awaited() if self.holdings.slots.is_touched(slot)]

    def near(self, now_s: float) -> bool:
        """Return whether a room's seal (the mark that all is written) is expected very soon, because its
        record has just arrived."""
        for room, slot in self.awaited():
            if room.near_until_s is None and announced(self.holdings.slots.view(slot)):
                room.near_until_s = now_s + self._near_s
            if room.near_until_s is not None and now_s < room.near_until_s:
                return True
        return False

    def poll(self, room: R) -> bool:
        """Check a room's metadata slot, and read the record if the slot is sealed. Return True if it is
        sealed or has wrong data.

        A seal of another room or generation, or a broken record, ends the room (`stale-never-served`).
        """
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

    def summed(self, room: R, total: int) -> None:
        """Compare the checksum of a room's landed pages with the checksum that the sender sent. The room
        fails if they differ."""
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

    @abstractmethod
    def _begin_output(self, room: R, first: Token) -> None:
        """Set the first output token of a room, from which decoding continues."""

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
