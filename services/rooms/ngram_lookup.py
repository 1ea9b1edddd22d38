"""What came the last time behind the tokens that a sequence ends with?

Texts repeat themselves: an edit repeats the code, a summary its source, a list its items. So what followed
the longest earlier occurrence of a sequence's end is a draft of what comes next. It follows from the tokens
alone: whoever knows them drafts the same (`drafts-agreed`).

The index is that of LZ77: of each pair of tokens where it ended last, and of each place where its pair ended
before. A token is entered in constant time and takes 12 bytes; a look-up compares CHAIN_MAX places at most.
"""

from array import array
from collections.abc import Sequence
from typing import Final

LEAST: Final = 2
"""Tokens of an occurrence: what follows a single one is anything."""
LONGEST: Final = 8
"""Tokens of an occurrence that are compared, where nobody says how many."""
CHAIN_MAX: Final = 16
"""Earlier occurrences of the last pair that are looked at, the last one first."""
_BUCKETS_MIN: Final = 2**8
_BUCKETS_MAX: Final = 2**16
_FACTOR: Final = 1_000_003
_NOWHERE: Final = 0


class NgramLookup:
    """Of one sequence. Places are counts of tokens: a pair is at the place where it ends."""

    def __init__(self, tokens_max: int, longest: int = LONGEST) -> None:
        """`tokens_max`: that are entered, about. `longest`: tokens of an occurrence that are compared."""
        buckets = _BUCKETS_MIN
        while buckets < min(tokens_max, _BUCKETS_MAX):
            buckets *= 2
        self._longest = longest
        self._tokens = array("I")
        self._last = array("I", [_NOWHERE]) * buckets
        """Of the pairs of each bucket, where one ended last."""
        self._before = array("I", [_NOWHERE])
        """Of each place, where a pair of its bucket ended before it."""

    def __len__(self) -> int:
        """Tokens entered."""
        return len(self._tokens)

    def enter(self, tokens: Sequence[int]) -> None:
        """They come behind those that were entered."""
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
        """Up to `most` tokens that may come next: those that followed the longest earlier occurrence of the
        end, of equals the last one. Where they reach the end they go on with themselves."""
        place = self._occurrence()
        if place == _NOWHERE:
            return []
        known = self._tokens
        drafted = known[place : place + most].tolist()
        for at in range(most - len(drafted)):
            drafted.append(drafted[at])
        return drafted

    def _occurrence(self) -> int:
        """Where the longest one ends."""
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
        """Tokens that are the same before both, as far as they are compared."""
        known = self._tokens
        for length in range(min(place, self._longest)):
            if known[place - 1 - length] != known[end - 1 - length]:
                return length
        return min(place, self._longest)
