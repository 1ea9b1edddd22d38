"""Ballot of one rank in a turn, and the verdict that all ranks take from it.

A ballot is a vector of 64-bit integers of fixed shape, agreed element by element by MIN. A value that must be
equal on all ranks is sent with its complement. The minimum of both is the value and its complement only if
every rank sent the same. A wish that one rank can block is sent as 0 or 1. An ABORT carries its reason, so
that ranks which saw nothing learn it in the same collective.

[turn, ~turn, roster digest, ~digest, may compute, may leave, connects, vote of room 0, of room 1, …]

A vote is 2 for ADVANCE, 1 for STAY, 0 for ABORT without a known reason, and -1 - i for ABORT for the i-th
`Reason`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from baton.rooms.errors import Reason, RostersDiverged
from baton.rooms.phases import Vote

HEADER: Final = 7
ROOMS_MAX: Final = (1 << 16) - HEADER
"""Most rooms of a roster whose ballot every rank group takes."""
_REASONS: Final = tuple(Reason)
_VOTES: Final = tuple(Vote)


@dataclass(slots=True)
class Ballot:
    turn: int
    digest: int
    may_compute: bool
    """Whether this rank's engine is free to start a step."""
    may_leave: bool
    """Whether this rank is draining and holds nothing."""
    votes: Sequence[Vote]
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    """Reasons of its ABORT votes, by room index."""
    connects: int = 0
    """Number of the turn's connections, from the first on, that this rank could make."""
    _words: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    """Encoded form, once it was needed."""

    def encode(self) -> Sequence[int]:
        words = self._words
        if not words:
            may = (int(self.may_compute), int(self.may_leave))
            words += [self.turn, ~self.turn, self.digest, ~self.digest, *may, self.connects]
            words += bytes(self.votes)  # plain integers, made without a call for each
            for place, reason in self._given():
                words[HEADER + place] = -1 - _REASONS.index(reason)
        return words

    def verdict(self) -> "Verdict":
        """Return the verdict of a group in which no other rank wishes for less."""
        reasons = dict(self._given()) if self.reasons else {}
        return Verdict(self.may_compute, self.may_leave, tuple(self.votes), reasons, self.connects)

    def _given(self) -> Iterator[tuple[int, Reason]]:
        return ((place, reason) for place, reason in self.reasons.items() if self.votes[place] is Vote.ABORT)


class Verdict(NamedTuple):
    compute: bool
    """Whether every rank's engine is free. Then all start the step that their equal tables name."""
    leave: bool
    votes: tuple[Vote, ...]
    reasons: Mapping[int, Reason]
    """Reasons of the ABORTs, by room index. If ranks gave several, the one listed last in `Reason`."""
    connects: int = 0
    """Number of the turn's connections, from the first on, that every rank could make."""


def read_verdict(mine: Ballot, agreed: Sequence[int]) -> Verdict:
    """Decode the minimum over all ranks. Raises RostersDiverged if ranks disagree on the turn or on their
    rooms."""
    if len(agreed) != HEADER + len(mine.votes):
        raise RostersDiverged(f"turn {mine.turn}: {len(agreed)} words agreed, {len(mine.votes)} places here")
    turn, turn_complement, digest, digest_complement, compute, leave, connects = agreed[:HEADER]
    if turn != ~turn_complement:
        raise RostersDiverged(f"turn {mine.turn}: ranks are in different turns ({turn}..{~turn_complement})")
    if digest != ~digest_complement:
        raise RostersDiverged(
            f"turn {mine.turn}: ranks hold different rooms (digests {digest:#x} to {~digest_complement:#x})"
        )
    if agreed == mine.encode():
        return mine.verdict()  # as nearly always: one look at each place is saved
    words = agreed[HEADER:]
    reasons = {}
    if min(words, default=0) < 0:
        reasons = {place: _REASONS[-1 - word] for place, word in enumerate(words) if word < 0}
        words = [max(word, Vote.ABORT) for word in words]
    return Verdict(bool(compute), bool(leave), tuple(map(_VOTES.__getitem__, words)), reasons, connects)
