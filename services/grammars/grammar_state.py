"""State of a grammar over one output, and the mask of tokens that it allows next.

The state follows from the grammar and the output alone (`mask-is-fold`). So another worker, in a later room,
computes the same state from the beginning. Each token of an output is read once, as the output grows. The
cost is bounded, since other requests wait for it.
"""

import time
from collections.abc import Sequence
from typing import Final, Protocol

from baton.rooms.request import Request

BITS: Final = 8
MASK_S: Final = 0.003
"""CPU time for one mask in seconds, averaged over an output, beyond which the output ends with GrammarLost.

Most masks take a hundredth of it.
"""
BURST_S: Final = 0.1
"""CPU time in seconds that all masks of one output may take in addition to MASK_S for each token."""
FORCED_S: Final = 0.001
"""CPU time in seconds, for each token of an output, that may be spent on finding tokens that the grammar
forces."""


class GrammarLost(Exception):
    """An output does not follow its grammar, or the grammar is too costly to follow any further.

    The message gives the reason.
    """


class Matcher(Protocol):
    """The methods of `llguidance.LLMatcher` that are used.

    They raise nothing: after an error the matcher stays in an error state.
    """

    def consume_tokens(self, sampled_tokens: list[int]) -> bool: ...
    def compute_bitmask(self) -> bytes: ...
    def compute_ff_tokens(self) -> list[int]: ...
    def is_accepting(self) -> bool: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...
    def reset(self) -> bool: ...
    def deep_copy(self) -> "Matcher": ...


class GrammarState:
    """State of a grammar over one output, which gives the mask for the next token.

    Used from one thread at a time.
    """

    def __init__(self, matcher: Matcher) -> None:
        """Wrap llguidance's `matcher` of a grammar, which has read no token yet."""
        self._matcher = matcher
        self._taken = 0
        """Number of tokens of the output that llguidance's matcher has read, from the first one on."""
        self._may_take_s = BURST_S
        self._forced: list[int] = []
        """Tokens that the grammar forces after the output read so far, as found by the last search for them.
        """
        self._may_look_s = 0.0
        """CPU time in seconds that is left for finding forced tokens. Below 0 if the last search took too
        long."""

    def anew(self) -> "GrammarState":
        """Return the state of the same grammar before the first token.

        Raises ValueError if this state has read any token.
        """
        if self._taken:
            raise ValueError(f"a fold that has taken {self._taken} tokens is no beginning")
        return self.copy()

    def copy(self) -> "GrammarState":
        """Return an independent copy of this grammar state, for another choice of the request."""
        copy = GrammarState(self._matcher.deep_copy())
        copy._taken = self._taken
        copy._may_take_s = self._may_take_s
        return copy

    def follow(self, output: Sequence[int]) -> None:
        """Read the tokens of `output` that were not read yet. Raises GrammarLost if the grammar does not
        allow them.

        If `output` is shorter than the tokens read so far, it is read again from its beginning.
        """
        if len(output) < self._taken:
            self._matcher.reset()
            self._taken, self._forced = 0, []
        new = [*output[self._taken :]]
        if new and not self._matcher.consume_tokens(new):
            raise GrammarLost(self._why())
        self._taken = len(output)
        self._forced = self._forced[len(new) :]  # the grammar allowed no other tokens
        self._may_look_s = min(0.0, self._may_look_s + FORCED_S * len(new))

    def allowed(self, request: Request, output: Sequence[int]) -> bytes:
        """Return the mask of the tokens that may follow `output`: one bit per token id, the lowest first.
        Never empty.

        The request's end tokens may come if the grammar may end. If not, its stop token ids may come like any
        token that the grammar allows, as stop strings do: they cut the answer off. `min_tokens` and
        `ignore_eos` delay an end, but if nothing else is allowed the answer ends. Raises GrammarLost.
        """
        before_s = time.thread_time()
        self.follow(output)
        mask = bytearray(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise GrammarLost(self._why())
        self._may_take_s += MASK_S - (time.thread_time() - before_s)
        if self._may_take_s < 0:
            raise GrammarLost("it takes too long at each token")
        whole = self._matcher.is_accepting()
        late = len(output) >= request.min_tokens
        for end in request.eos_token_ids:
            _set(mask, end, on=whole and late and not request.ignore_eos)
        for stop in request.stop_token_ids:
            _set(mask, stop, on=late and (whole or _has(mask, stop)))
        if mask.count(0) == len(mask):
            for end in request.ending_token_ids:
                _set(mask, end, on=True)
        return bytes(mask)

    def forced(self, output: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that must follow `output`, because the grammar allows no alternative.

        Returns none if masks allow several spellings of a text. A search that takes long, for example before
        a constant of 100 KB, is bounded: its result is used up before the next search, which waits for a
        while. Raises GrammarLost.
        """
        before_s = time.thread_time()
        self.follow(output)
        followed_s = time.thread_time()
        self._may_take_s -= followed_s - before_s
        if not self._forced and self._may_look_s >= 0:
            self._forced = self._matcher.compute_ff_tokens()
            self._may_look_s = FORCED_S - (time.thread_time() - followed_s)
        return self._forced[:most]

    def _why(self) -> str:
        return first_line(self._matcher.get_error())


def first_line(text: str) -> str:
    """Return the first line of an error message of llguidance. Its other lines hold the grammar's text."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


def _has(mask: bytearray, token: int) -> bool:
    return token < BITS * len(mask) and bool(mask[token // BITS] >> token % BITS & 1)


def _set(mask: bytearray, token: int, *, on: bool) -> None:
    """Set or clear the bit of a token in a mask. A token outside the vocabulary is ignored."""
    if token >= BITS * len(mask):
        return
    bit = 1 << token % BITS
    if on:
        mask[token // BITS] |= bit
    else:
        mask[token // BITS] &= ~bit
