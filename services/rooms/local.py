"""Does a decode worker compute a room's prompt itself, or is it prefill's?

Whoever has it sooner does (`mine-or-granted`). Here the prompt is computed in parts, beside the sequences
that run, and each part may hold these up for so long at most; there it waits for those before it. What is
cached here is not computed. So short rests of long conversations are computed here, and long prompts as
well, while prefill workers have more to do than this one.

The leader decides, by its own clock; all ranks hear it as a command. Pure.
"""

from dataclasses import dataclass, field
from math import ceil
from typing import Final

WEIGHT: Final = 0.2
"""Of the last step, in what is known of steps."""
TRIED_TOKENS: Final = 64
"""Of a prompt, in a step, where nothing is known of how long that takes."""
KNOWN_STEPS: Final = 1000
"""After as many others what was known of a kind of steps is forgotten."""
TRIED_STEPS: Final = 2
"""How many times as long such a step is believed to take, until one was tried."""


@dataclass(slots=True)
class PromptPace:
    """How long do parts of prompts take in this worker's steps?"""

    gap_ms: float
    """For how long a part may hold up the sequences that run; 0: nothing is computed here but what no prefill
    worker is there for."""
    alone_tokens: int
    """Of prompts, in a step that holds nobody up."""
    least_tokens: int
    """Of prompts, in any step that has some."""
    step_ms: float = field(default=0.0, init=False)
    """Of a step without a part of a prompt."""
    token_ms: float | None = field(default=None, init=False)
    """That a prompt's token adds to a step that continues sequences, once it did."""
    alone_ms: float | None = field(default=None, init=False)
    """That a prompt's token takes in a step that continues none, once it did."""

    _beside_ago: int = field(default=0, init=False)
    """Steps since `token_ms` was measured."""
    _alone_ago: int = field(default=0, init=False)
    """The same of `alone_ms`."""

    def stepped(self, prompt_tokens: int, sequences: int, ms: float) -> None:
        """A step ended that continued so many sequences, and computed so many tokens of prompts beside."""
        self._beside_ago += 1
        self._alone_ago += 1
        if not prompt_tokens:
            self.step_ms = _mixed(self.step_ms or None, ms)
        elif sequences:
            self.token_ms = _mixed(self.token_ms, max(ms - self.step_ms, 0.0) / prompt_tokens)
            self._beside_ago = 0
        else:
            self.alone_ms = _mixed(self.alone_ms, ms / prompt_tokens)
            self._alone_ago = 0
        # It may have been an odd one, by which none would be computed again.
        if self._beside_ago == KNOWN_STEPS:
            self.token_ms = None
        if self._alone_ago == KNOWN_STEPS:
            self.alone_ms = None

    @property
    def beside_tokens(self) -> int:
        """Of prompts, in a step that holds others up."""
        added_ms = _first(self.token_ms, self.alone_ms)
        if added_ms is None:
            return max(min(TRIED_TOKENS, self.alone_tokens), self.least_tokens)
        if added_ms <= 0:
            return self.alone_tokens
        return max(min(int(self.gap_ms / added_ms), self.alone_tokens), self.least_tokens)

    def tokens_within(self, ms: float) -> int:
        """Of prompts, in a step that continues none and takes about so many milliseconds, or is as short as
        one beside others."""
        each_ms = _first(self.alone_ms, self.token_ms)
        fits = int(ms / each_ms) if each_ms else 0
        return max(min(fits, self.alone_tokens), self.beside_tokens)

    def prompt_ms(self, tokens: int, beside_steps: int) -> float | None:
        """How long so many tokens of prompts take; None where nothing is known of it. `beside_steps`: how
        many more steps sequences run, at most."""
        each = self.beside_tokens
        steps = ceil(tokens / each)
        added_ms, alone_ms = _first(self.token_ms, self.alone_ms), _first(self.alone_ms, self.token_ms)
        if added_ms is None or alone_ms is None:
            return steps * TRIED_STEPS * self.step_ms or None
        steps = min(steps, beside_steps)
        beside = min(steps * each, tokens)
        return steps * self.step_ms + beside * added_ms + (tokens - beside) * alone_ms


@dataclass(frozen=True, slots=True)
class LocalRoom:
    """Why a room is computed here."""

    missing_tokens: int
    known_tokens: int
    here_ms: float | None
    """Until it has its first token here; None where nothing is known of how long that takes."""
    prefill_ms: float
    """Until it has its first token there."""

    def __str__(self) -> str:
        missing = f"{self.missing_tokens:,} of {self.known_tokens:,} tokens are missing here"
        here = "not known yet how long that takes" if self.here_ms is None else f"{self.here_ms:.0f} ms"
        return f"{missing}: {here}, where prefill would take {self.prefill_ms:.0f} ms"


def computed_here(
    pace: PromptPace, missing: int, known: int, ahead: int, prefill_ms: float, beside_steps: int
) -> LocalRoom | None:
    """Of a room of `known` tokens; None: it is prefill's. `missing`: of these, in this worker's pages.
    `ahead`: tokens of other prompts that are to be computed here before it. `prefill_ms`: until prefill has
    computed it, from now on. `beside_steps`: how many more steps sequences run here, at most. Where no step
    was made yet, one is tried."""
    if not pace.gap_ms or prefill_ms <= 0:
        return None
    here_ms = pace.prompt_ms(ahead + missing, beside_steps)
    here_first = not (beside_steps or ahead) if here_ms is None else here_ms <= prefill_ms
    return LocalRoom(missing, known, here_ms, prefill_ms) if here_first else None


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else before + WEIGHT * (now - before)


def _first(one: float | None, other: float | None) -> float | None:
    """What is known of both, the one before the other."""
    return other if one is None else one
