"""What does one rank bring to a turn's agreement, and what do all ranks take from it?

A ballot is a fixed-shape vector of 64-bit integers, agreed element by element by MIN. A value that
must be equal on all ranks is sent with its complement: the minimum of both is the value and its
complement only if every rank sent the same. A wish that one rank's hold must block is sent as 0/1.
An ABORT carries its reason, so that ranks which saw nothing learn why in the same collective.

    [turn, ~turn, roster digest, ~digest, may compute, may leave, connects, vote of place 0, of place 1, …]

    a vote: 2 ADVANCE, 1 STAY, 0 ABORT for no known reason, -1 - i ABORT for the i-th `Reason`
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from baton.rooms.errors import Reason, RostersDiverged
from baton.rooms.phases import Vote

HEADER: Final = 7
PLACES_MAX: Final = (1 << 16) - HEADER
"""Of a roster whose ballot every group takes."""
_REASONS: Final = tuple(Reason)
_VOTES: Final = tuple(Vote)


@dataclass(slots=True)
class Ballot:
    turn: int
    digest: int
    may_compute: bool
    """This rank's engine is free to start a step."""
    may_leave: bool
    """This rank is draining and holds nothing."""
    votes: Sequence[Vote]
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    """Of its ABORTs, by place."""
    connects: int = 0
    """How many of the turn's connections, from the first on, this rank could make."""
    _words: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    """As encoded, once they were asked for."""

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
        """That of a group in which no other rank wishes for less."""
        reasons = dict(self._given()) if self.reasons else {}
        return Verdict(self.may_compute, self.may_leave, tuple(self.votes), reasons, self.connects)

    def _given(self) -> Iterator[tuple[int, Reason]]:
        return ((place, reason) for place, reason in self.reasons.items() if self.votes[place] is Vote.ABORT)


class Verdict(NamedTuple):
    compute: bool
    """Every rank's engine is free: all start the step that their equal tables name."""
    leave: bool
    votes: tuple[Vote, ...]
    reasons: Mapping[int, Reason]
    """Of the ABORTs, by place. Where ranks gave several, the one listed last in `Reason`."""
    connects: int = 0
    """How many of the turn's connections, from the first on, every rank could make."""


def read_verdict(mine: Ballot, agreed: Sequence[int]) -> Verdict:
    """Decode the minimum over all ranks. Raises RostersDiverged when ranks disagree on turn or rooms."""
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
