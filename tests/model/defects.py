"""Would the checker see the five defects this project starts from? Each is put back into the product's own
class for the length of a test. (`tests/mutants/field.txt` has them as changes of the source.)"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from services.pages.slots import Slot, SlotPool
from services.rooms.errors import Cause, Reason
from services.rooms.evidence import Evidence, Failed
from services.rooms.ids import RoomId
from services.rooms.phases import Effect, Phase, Vote
from services.rooms.receiver import Receiver
from services.rooms.roster import TOMBSTONE_MS, Roster, Tombstone


def slot_zero(patch: pytest.MonkeyPatch) -> None:
    """A slot was put back on the free list as it was, its last owner's room id still in it."""

    def leave_as_it_is(pool: SlotPool, slot: Slot) -> None:
        return

    patch.setattr(SlotPool, "_zero", leave_as_it_is)


def terminal_creates_nothing(patch: pytest.MonkeyPatch) -> None:
    """A failure was written to the table of statuses, whether or not the room was still in it."""
    note = Roster.note

    def write_the_status(roster: Roster[Any], room: RoomId, evidence: Evidence) -> bool:
        if isinstance(evidence, Failed) and room not in roster:
            roster._bury(room, Tombstone(TOMBSTONE_MS, evidence.cause))
            return True
        return note(roster, room, evidence)

    patch.setattr(Roster, "note", write_the_status)


def gate_before_agree(patch: pytest.MonkeyPatch) -> None:
    """Ranks agreed on the pages alone; whether the record was there, each looked up for itself."""

    def pages_are_enough(room: Receiver) -> bool:
        if room.phase is Phase.BOOTSTRAPPING:
            return room.connected
        return room.pages_landed == room.pages_expected

    patch.setattr(Receiver, "_ready", pages_are_enough)


def one_retire(patch: pytest.MonkeyPatch) -> None:
    """Setting the status to Failed popped the room from the table, and nothing else of it."""

    def pop_on_the_side(roster: Roster[Any], room: RoomId, cause: Cause, now_ms: int) -> bool:
        return roster._rooms.pop(room, None) is not None

    patch.setattr(Roster, "cancel", pop_on_the_side)


def failure_is_agreed(patch: pytest.MonkeyPatch) -> None:
    """An aborted request was no part of what the ranks agreed on: only its own rank dropped it."""
    votes, settle = Roster.votes, Roster.settle

    def successes_only(roster: Roster[Any], *args: Any) -> list[Vote]:
        return [max(vote, Vote.STAY) for vote in votes(roster, *args)]

    def each_for_itself(
        roster: Roster[Any], verdicts: Sequence[Vote], now_ms: int, reasons: Mapping[int, Reason]
    ) -> list[tuple[Any, Effect]]:
        mine = list(verdicts)
        for room in roster:
            if room.phase is Phase.BOOTSTRAPPING and room.cause is not None:
                mine[room.place] = Vote.ABORT
        return settle(roster, mine, now_ms, reasons)

    patch.setattr(Roster, "votes", successes_only)
    patch.setattr(Roster, "settle", each_for_itself)
