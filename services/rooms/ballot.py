"""Ballot of one rank in one turn, and the verdict that all ranks take from their ballots.

A turn is one iteration of a worker's loop. In each, every rank votes on every room. A ballot is a vector of
64-bit integers of fixed shape. The ranks agree by an all-reduce, which takes the minimum of each element over
all ranks. A value that must be equal on all ranks is sent with its complement. The minimum of both is the
value and its complement only if every rank sent the same. A wish that one rank can block is sent as 0 or 1.
An ABORT carries its reason, so that ranks which saw nothing learn it in the same collective.

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
"""Most rooms in a roster. A ballot with more would be longer than the longest that rank groups exchange."""
_REASONS: Final = tuple(Reason)
_VOTES: Final = tuple(Vote)


@dataclass(slots=True)
class Ballot:
    turn: int
    digest: int
    may_compute: bool
    """Whether this rank's engine is free to start a step."""
    may_leave: bool
    """Whether this rank is draining and has no room any more."""
    votes: Sequence[Vote]
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    """Reasons of this rank's ABORT votes, by index of the room in the roster."""
    connects: int = 0
    """Number of connects to decode memory that succeeded on this rank in this turn, before the first that
    failed."""
    _words: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    """Integers of the encoded ballot. The first call of `encode` stores them. Empty before."""

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
        """Return the verdict for the usual case that the minimum over all ranks' ballots is this ballot
        itself."""
        reasons = dict(self._given()) if self.reasons else {}
        return Verdict(self.may_compute, self.may_leave, tuple(self.votes), reasons, self.connects)

    def _given(self) -> Iterator[tuple[int, Reason]]:
        return ((place, reason) for place, reason in self.reasons.items() if self.votes[place] is Vote.ABORT)


class Verdict(NamedTuple):
    compute: bool
    """Whether the engine of every rank is free. If so, all ranks start the next step. They choose it from
    equal data."""
    leave: bool
    votes: tuple[Vote, ...]
    reasons: Mapping[int, Reason]
    """Reasons of the agreed ABORTs, by index of the room. If ranks gave several, the one listed last in
    `Reason`."""
    connects: int = 0
    """Number of connects to decode memory that succeeded on every rank in this turn, before the first that
    failed."""


def read_verdict(mine: Ballot, agreed: Sequence[int]) -> Verdict:
    """Decode the minimum of all ranks' ballots into a verdict. Raises RostersDiverged if ranks disagree on
    the turn or on their rooms."""
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
        return mine.verdict()  # nearly always so, and cheaper than decoding each element
    words = agreed[HEADER:]
    reasons = {}
    if min(words, default=0) < 0:
        reasons = {place: _REASONS[-1 - word] for place, word in enumerate(words) if word < 0}
        words = [max(word, Vote.ABORT) for word in words]
    return Verdict(bool(compute), bool(leave), tuple(map(_VOTES.__getitem__, words)), reasons, connects)
