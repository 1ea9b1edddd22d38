"""Turn of one rank: the order in which it votes, agrees with the other ranks, moves its rooms and computes.

All ranks of a worker take the same turns (`same-turns`). A driver carries commands, evidence and messages
between the ranks. In each turn it makes one `Turn` on each rank, and uses it in this order:

* `Turn(...)` votes from this rank's evidence. The result is `ballot`.
* `agree` enters the minimum of all ranks' ballots. The result is `verdict`.
* `dissents` yields votes of this rank to be reported.
* `causes` returns bytes that each rank sends to all others, or None.
* `settle` enters these bytes. It returns the moves of rooms, each of which the driver performs.
* `computes` says whether the next step starts.
* `end` returns the kind of the turn, which decides how soon the next one follows.

No rank moves a room before all ranks have agreed (`apply-verdict`). A method that is called too early raises
LocalBug.
"""

import json
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from baton.ids import RoomId
from baton.rooms.ballot import Ballot, Verdict, read_verdict
from baton.rooms.errors import Cause, LocalBug
from baton.rooms.evidence import Failed
from baton.rooms.phases import Effect, ReceiverEffect, Vote
from baton.rooms.room import Room
from baton.rooms.roster import Capacity, Roster

TEXT_MAX: Final = 300
CAUSES_MAX: Final = 512
"""Most rooms that end in one turn for which each rank sends the text of the cause, of at most TEXT_MAX
characters. For further rooms, the other ranks learn only the kind of cause."""

R = TypeVar("R", bound=Room)


class Lap(Enum):
    """Kind of a turn that has ended. It decides how soon the next turn follows."""

    QUEUED = "queued"
    """Turn in which rooms moved to a queue, and now lack only capacity for the next move. The next turn
    follows at once."""
    BUSY = "busy"
    """Turn in which a room moved or new evidence came. The next turn may follow at once."""
    BEHIND = "behind"
    """Turn in which nothing moved, because another rank lacked evidence that this rank has. The next turn
    follows soon."""
    IDLE = "idle"
    LAST = "last"
    """Turn in which all ranks agreed to leave."""


class Turn(Generic[R]):
    """One turn of one rank, after the commands of the turn were applied and evidence was collected."""

    def __init__(
        self,
        number: int,
        roster: Roster[R],
        now_ms: int,
        capacity: Capacity,
        *,
        ranks: int,
        may_compute: bool = True,
        may_leave: bool = False,
        connects: int = 0,
    ) -> None:
        """Vote on every room of the roster.

        `number`: number of the turn, the same on every rank. `ranks`: number of ranks of the worker.
        `may_compute`: whether this rank's engine is free to start a step. `may_leave`: whether this rank is
        draining and has no room left. `connects`: number of connects of this turn that succeeded on this
        rank, before the first that failed.
        """
        votes = roster.votes(now_ms, capacity)
        digest, reasons = roster.digest(capacity), roster.reasons(now_ms, votes)
        self.ballot = Ballot(number, digest, may_compute, may_leave, votes, reasons, connects)
        """Ballot of this rank. The ranks agree on the minimum of all ballots."""
        self._roster = roster
        self._now_ms = now_ms
        self._is_group = ranks > 1
        self._verdict: Verdict | None = None
        self._moves: list[tuple[R, Any]] | None = None

    def agree(self, least: Sequence[int]) -> None:
        """Enter the minimum of all ranks' encoded ballots. Raises RostersDiverged if ranks disagree on the
        turn or on their rooms."""
        self._verdict = read_verdict(self.ballot, least)

    @property
    def verdict(self) -> Verdict:
        """Verdict of all ranks. Raises LocalBug before `agree`."""
        if self._verdict is None:
            raise LocalBug(f"turn {self.ballot.turn}: no rank may act before all have agreed")
        return self._verdict

    @property
    def computes(self) -> bool:
        """Whether the engine of every rank is free, so that all ranks start the next step."""
        return self.verdict.compute

    def dissents(self) -> Iterator[tuple[R, Vote]]:
        """Yield this rank's votes for the timelines of rooms about which ranks may have voted differently.

        These are its votes to end a room, and its votes to advance a room that another rank does not advance.
        A worker of one rank has none.
        """
        votes, verdict = self.ballot.votes, self.verdict
        if not self._is_group or (not verdict.reasons and tuple(votes) == verdict.votes):
            return
        for room in self._roster:
            vote = votes[room.index]
            stays = vote is Vote.ADVANCE and verdict.votes[room.index] is not Vote.ADVANCE
            if vote is Vote.ABORT or stays:
                yield room, vote

    def causes(self) -> bytes | None:
        """Return the texts of the causes that this rank knows of the rooms that end, as bytes.

        Each rank sends them to all others, so the client gets the first cause, whichever rank saw it
        (`first-cause-wins`). In one turn all ranks return bytes, or all return None.
        """
        if not self._has_causes:
            return None
        reasons = self.verdict.reasons
        mine = [
            (room.id, cause.text[:TEXT_MAX])
            for room in self._roster
            if (cause := room.ending(self._now_ms)) is not None and reasons.get(room.index) is cause.reason
        ]
        return _encoded(mine[:CAUSES_MAX])

    def settle(self, causes: Sequence[bytes] = ()) -> list[tuple[R, Any]]:
        """Move each room as all ranks agreed. Return the rooms whose move has an effect, with the effect,
        which the driver performs in this order.

        `causes`: bytes of every rank's `causes`, in rank order. Empty if these are None. Raises LocalBug if
        the ranks have not agreed, have not exchanged their causes, or have settled before.
        """
        verdict = self.verdict
        if self._moves is not None or self._has_causes != bool(causes):
            raise LocalBug(f"turn {self.ballot.turn}: settles twice, or without the causes of all ranks")
        for payload in causes:
            self._note_causes(payload)
        self._moves = self._roster.settle(verdict.votes, self._now_ms, verdict.reasons)
        return self._moves

    def end(self, *, found: bool, more: bool) -> Lap:
        """Return the kind of this turn. `found`: whether evidence of this rank came since the turn before.
        `more`: whether the started step already has something for the next turn. Raises LocalBug before
        `settle`."""
        if self._moves is None:
            raise LocalBug(f"turn {self.ballot.turn}: ends before its rooms have moved")
        if self.verdict.leave:
            return Lap.LAST
        effects = [effect for _, effect in self._moves]
        if not found and Effect.QUEUE in effects:
            return Lap.QUEUED
        # The reply to a grant comes from outside. In a group, the grant itself leaves in the next turn.
        if found or more or any(effect is not ReceiverEffect.GRANT or self._is_group for effect in effects):
            return Lap.BUSY
        return Lap.BEHIND if self._is_group and self._is_ahead() else Lap.IDLE

    @property
    def _has_causes(self) -> bool:
        return self._is_group and bool(self.verdict.reasons)

    def _note_causes(self, payload: bytes) -> None:
        for name, text in json.loads(payload):
            room = RoomId(name)
            reason = self.verdict.reasons[self._roster.get(room).index]
            self._roster.note(room, Failed(Cause(reason, text)))

    def _is_ahead(self) -> bool:
        """Return whether this rank voted to advance a room or to start a step, while another rank did not."""
        verdict = self.verdict
        if self.ballot.may_compute and not verdict.compute:
            return True
        return any(
            vote is Vote.ADVANCE and agreed is Vote.STAY
            for vote, agreed in zip(self.ballot.votes, verdict.votes, strict=True)
        )


def _encoded(causes: list[tuple[RoomId, str]]) -> bytes:
    """Return rooms and the texts of their causes as JSON bytes, which fit into one message of the rank group.

    No character takes more than six bytes. An unpaired surrogate, which UTF-8 text cannot have, becomes an
    escape.
    """
    return json.dumps(causes, ensure_ascii=False).encode("utf-8", "backslashreplace")
