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
"""After as many without a part of a prompt what was known of these is forgotten."""
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
    """That a prompt's token adds to a step, once one was computed."""

    _steps: int = field(default=0, init=False)
    """Since a prompt's token was computed."""

    def stepped(self, prompt_tokens: int, sequences: int, ms: float) -> None:
        """A step ended that continued so many sequences, and computed so many tokens of prompts beside."""
        if not prompt_tokens:
            self.step_ms = _mixed(self.step_ms or ms, ms)
            self._steps += 1
            if self._steps == KNOWN_STEPS:
                self.token_ms = None  # it may have been an odd one, by which none would be computed again
            return
        self._steps = 0
        each = max(ms - self.step_ms * bool(sequences), 0.0) / prompt_tokens
        self.token_ms = _mixed(each if self.token_ms is None else self.token_ms, each)

    @property
    def beside_tokens(self) -> int:
        """Of prompts, in a step that holds others up."""
        if self.token_ms is None:
            return max(min(TRIED_TOKENS, self.alone_tokens), self.least_tokens)
        if self.token_ms <= 0:
            return self.alone_tokens
        return max(min(int(self.gap_ms / self.token_ms), self.alone_tokens), self.least_tokens)

    def prompt_ms(self, tokens: int, *, beside: bool) -> float | None:
        """How long so many tokens of prompts take; None where nothing is known of it. `beside`: sequences
        run."""
        steps = ceil(tokens / self.beside_tokens)
        if self.token_ms is None:
            return steps * TRIED_STEPS * self.step_ms or None
        return beside * steps * self.step_ms + tokens * self.token_ms


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
    pace: PromptPace, missing: int, known: int, ahead: int, prefill_ms: float, *, beside: bool
) -> LocalRoom | None:
    """Of a room of `known` tokens; None: it is prefill's. `missing`: of these, in this worker's pages.
    `ahead`: tokens of other prompts that are to be computed here before it. `prefill_ms`: until prefill has
    computed it, from now on. `beside`: sequences run here. Where no step was made yet, one is tried."""
    if not pace.gap_ms or prefill_ms <= 0:
        return None
    here_ms = pace.prompt_ms(ahead + missing, beside=beside)
    here_first = not (beside or ahead) if here_ms is None else here_ms <= prefill_ms
    return LocalRoom(missing, known, here_ms, prefill_ms) if here_first else None


def _mixed(before: float, now: float) -> float:
    return before + WEIGHT * (now - before)
