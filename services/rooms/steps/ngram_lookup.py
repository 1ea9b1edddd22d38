"""Drafts from the sequence itself: the tokens that followed its last n-gram earlier.

Texts repeat themselves: an edit repeats the code, a summary its source, a list its items. The tokens after
the longest earlier occurrence of a sequence's end are a draft of the next ones. It depends on the tokens
alone, so all ranks draft the same (`drafts-agreed`).

The index is that of LZ77: the last end of each pair of tokens, and for each position the previous end of its
pair. A token is entered in constant time and takes 12 bytes. A look-up compares CHAIN_MAX positions at most.
"""

from array import array
from collections.abc import Sequence
from typing import Final

LEAST: Final = 2
"""Least tokens of an occurrence. What follows a single token is arbitrary."""
LONGEST: Final = 8
"""Most tokens of an occurrence that are compared, by default."""
CHAIN_MAX: Final = 16
"""Earlier occurrences of the last pair that are compared, the last one first."""
_BUCKETS_MIN: Final = 2**8
_BUCKETS_MAX: Final = 2**16
_FACTOR: Final = 1_000_003
_NOWHERE: Final = 0


class NgramLookup:
    """N-gram index of one sequence. Positions are token counts, and a pair is at the position where it
    ends."""

    def __init__(self, tokens_max: int, longest: int = LONGEST) -> None:
        """`tokens_max`: expected number of tokens. `longest`: most tokens of an occurrence that are
        compared."""
        buckets = _BUCKETS_MIN
        while buckets < min(tokens_max, _BUCKETS_MAX):
            buckets *= 2
        self._longest = longest
        self._tokens = array("I")
        self._last = array("I", [_NOWHERE]) * buckets
        """Last end of a pair, by bucket."""
        self._before = array("I", [_NOWHERE])
        """Previous end of a pair of the same bucket, by position."""

    def __len__(self) -> int:
        """Return the number of tokens entered."""
        return len(self._tokens)

    def enter(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
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
        end, or of equals the last one. A draft that reaches the end repeats itself."""
        place = self._occurrence()
        if place == _NOWHERE:
            return []
        known = self._tokens
        drafted = known[place : place + most].tolist()
        for at in range(most - len(drafted)):
            drafted.append(drafted[at])
        return drafted

    def _occurrence(self) -> int:
        """Return the end of the longest earlier occurrence."""
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
        """Return how many tokens before both positions are equal, as far as they are compared."""
        known = self._tokens
        for length in range(min(place, self._longest)):
            if known[place - 1 - length] != known[end - 1 - length]:
                return length
        return min(place, self._longest)
