"""Which tokens may come next, after an output that is held to a grammar?

It follows from the grammar and the output alone (`mask-is-fold`): whoever knows both knows it, on another
worker, in a later room, from the beginning. A fold takes each token of an output once, as it grows. What it
may cost is bounded: others wait for it.
"""

import time
from collections.abc import Sequence
from typing import Final, Protocol

from baton.rooms.request import Request

BITS: Final = 8
MASK_S: Final = 0.003
"""Of the processor's time, that a mask may take, over all of an output. Most take a hundredth of that."""
BURST_S: Final = 0.1
"""That all masks of an output may take beyond that."""
FORCED_S: Final = 0.001
"""Of the processor's time, that looking for what is forced may take for each token, over all of an output."""


class GrammarLost(Exception):
    """An output cannot be held to its grammar, or not any further; the text says why."""


class Matcher(Protocol):
    """What is used of `llguidance.LLMatcher`. It raises nothing: after an error it stays in error."""

    def consume_tokens(self, sampled_tokens: list[int]) -> bool: ...
    def compute_bitmask(self) -> bytes: ...
    def compute_ff_tokens(self) -> list[int]: ...
    def is_accepting(self) -> bool: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...
    def reset(self) -> bool: ...
    def deep_copy(self) -> "Matcher": ...


class GrammarState:
    """A grammar over one output. Used from one thread at a time."""

    def __init__(self, matcher: Matcher) -> None:
        """`matcher` has taken nothing."""
        self._matcher = matcher
        self._taken = 0
        """Tokens of the output."""
        self._may_take_s = BURST_S
        self._forced: list[int] = []
        """Behind what was taken, as far as it was looked for."""
        self._may_look_s = 0.0
        """For what is forced. Below 0 where the last look took too long: others wait for each."""

    def anew(self) -> "GrammarState":
        """The same grammar over another output, from its beginning. Only while nothing was taken here."""
        if self._taken:
            raise ValueError(f"a fold that has taken {self._taken} tokens is no beginning")
        return self.copy()

    def copy(self) -> "GrammarState":
        """The same grammar behind the same output, from where each goes on by itself."""
        copy = GrammarState(self._matcher.deep_copy())
        copy._taken = self._taken
        copy._may_take_s = self._may_take_s
        return copy

    def follow(self, output: Sequence[int]) -> None:
        """Take what `output` has beyond what was taken. Raises GrammarLost."""
        if len(output) < self._taken:
            self._matcher.reset()
            self._taken, self._forced = 0, []
        new = [*output[self._taken :]]
        if new and not self._matcher.consume_tokens(new):
            raise GrammarLost(self._why())
        self._taken = len(output)
        self._forced = self._forced[len(new) :]  # nothing else can have been taken
        self._may_look_s = min(0.0, self._may_look_s + FORCED_S * len(new))

    def allowed(self, request: Request, output: Sequence[int]) -> bytes:
        """The tokens that may follow `output`, never none: a bit each, the lowest first. Raises GrammarLost.

        The request's ends may come where the grammar may end. Where it may not, its own stop ids may come as
        any other token that the grammar allows, as stop strings do: they cut the answer off. `min_tokens` and
        `ignore_eos` put an end off, but where nothing else is allowed the answer ends.
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
        """The tokens that follow `output` whatever is drawn, `most` of them, as far as the grammar leaves no
        other. None where masks allow several spellings of a text, and for a while behind a look that took
        long, as it does before a constant of 100 KB: what it found is kept. Raises GrammarLost."""
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
    """Of what the library says, which goes on with the grammar."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


def _has(mask: bytearray, token: int) -> bool:
    return token < BITS * len(mask) and bool(mask[token // BITS] >> token % BITS & 1)


def _set(mask: bytearray, token: int, *, on: bool) -> None:
    """A token that the vocabulary lacks is passed over: it cannot be drawn anyway."""
    if token >= BITS * len(mask):
        return
    bit = 1 << token % BITS
    if on:
        mask[token // BITS] |= bit
    else:
        mask[token // BITS] &= ~bit
