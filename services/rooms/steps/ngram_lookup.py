"""Draft tokens by n-gram look-up: the tokens that followed the sequence's last n-gram earlier in the
sequence.

Texts repeat themselves: an edit repeats the code, a summary its source, a list its items. The tokens after
the longest earlier occurrence of a sequence's end are a draft of the next ones. The draft depends on the
tokens alone, so all ranks draft the same (`drafts-agreed`).

The index is that of LZ77. It has the last end of each pair of tokens, and for each position the previous end
of the same pair. A token is entered in constant time and takes 12 bytes. A look-up compares CHAIN_MAX
positions at most.
"""

from array import array
from collections.abc import Sequence
from typing import Final

LEAST: Final = 2
"""Least length of an n-gram, in tokens. A single token says too little about the tokens after it."""
LONGEST: Final = 8
"""Default of the longest n-gram that a look-up compares, in tokens."""
CHAIN_MAX: Final = 16
"""Most earlier occurrences of the last two tokens that a look-up compares, the latest first."""
_BUCKETS_MIN: Final = 2**8
_BUCKETS_MAX: Final = 2**16
_FACTOR: Final = 1_000_003
_NOWHERE: Final = 0


class NgramLookup:
    """N-gram index over the tokens of one sequence. A position is a number of tokens from the beginning, and
    a pair of tokens is at the position where it ends."""

    def __init__(self, tokens_max: int, longest: int = LONGEST) -> None:
        """Make an empty index. `tokens_max`: expected number of tokens. `longest`: longest n-gram that is
        compared, in tokens."""
        buckets = _BUCKETS_MIN
        while buckets < min(tokens_max, _BUCKETS_MAX):
            buckets *= 2
        self._longest = longest
        self._tokens = array("I")
        self._last = array("I", [_NOWHERE]) * buckets
        """Position at which a pair of tokens last ended, by hash bucket of the pair."""
        self._before = array("I", [_NOWHERE])
        """For each position, the previous position whose token pair is in the same hash bucket."""

    def __len__(self) -> int:
        """Return the number of tokens in the index."""
        return len(self._tokens)

    def enter(self, tokens: Sequence[int]) -> None:
        """Append tokens to the indexed part of the sequence."""
        known, last, before = self._tokens, self._last, self._before
        place, mask = len(known), len(last) - 1
        earlier = known[-1] if known else 0
        for token in tokens:
            place += 1
            bucket = (earlier * _FACTOR ^ token) & mask
            before.append(last[bucket])
            last[bucket] = place
            earlier = token
        known.extend(tokens)

    def draft(self, most: int) -> list[int]:
        """Return up to `most` tokens that may come next: those after the longest earlier occurrence of the
        sequence's end. Of equally long ones, the latest counts. If a draft reaches the end of the sequence,
        it goes on by repeating itself."""
        place = self._occurrence()
        if place == _NOWHERE:
            return []
        known = self._tokens
        drafted = known[place : place + most].tolist()
        for at in range(most - len(drafted)):
            drafted.append(drafted[at])
        return drafted

    def _occurrence(self) -> int:
        """Return the position after the longest earlier occurrence of the sequence's last tokens, or
        _NOWHERE."""
        end = len(self._tokens)
        best, most = _NOWHERE, LEAST - 1
        place = self._before[end]
        for _ in range(CHAIN_MAX):
            if place == _NOWHERE or most == self._longest:
                break
            length = self._common(place, end)
            if length > most:
                best, most = place, length
            place = self._before[place]
        return best

    def _common(self, place: int, end: int) -> int:
        """Return how many tokens directly before two positions are equal, at most the length of the longest
        n-gram."""
        known = self._tokens
        for length in range(min(place, self._longest)):
            if known[place - 1 - length] != known[end - 1 - length]:
                return length
        return min(place, self._longest)
