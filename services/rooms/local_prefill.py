"""Does a decode worker compute a room's prompt itself, or is it prefill's?

Whoever has it sooner does (`mine-or-granted`). Here the prompt is computed in parts, beside the sequences
that run, and each part may hold these up for so long at most; there it waits for those before it. What is
cached here is not computed. So short rests of long conversations are computed here, and long prompts as
well, while prefill workers have more to do than this one.

The leader decides, by its own clock; all ranks hear it as a command. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final, NamedTuple

from baton.rooms.step_cost import OUTLIER, StepCost

WEIGHT: Final = 0.2
"""Of the last step, in what is known of steps."""
TRIED_TOKENS: Final = 64
"""Of a prompt, in a step, where nothing is known of how long that takes."""
KNOWN_STEPS: Final = 1000
"""After as many others what was known of a kind of steps is forgotten."""
TRIED_STEPS: Final = 2
"""How many times as long such a step is believed to take, until one was tried."""


@dataclass(slots=True)
class PromptTiming:
    """How long do parts of prompts take in this worker's steps?"""

    gap_ms: float
    """For how long a part may hold up the sequences that run; 0: nothing is computed here but what no prefill
    worker is there for."""
    alone_tokens: int
    """Of prompts, in a step that holds nobody up."""
    least_tokens: int
    """Of prompts, in any step that has some."""
    _steps: StepCost = field(default_factory=StepCost, init=False)
    """Without parts of prompts, by how many sequences they continue."""
    _slower: float = field(default=1.0, init=False)
    """Times what a step takes by these, the last ones took: KV grows longer."""
    token_ms: float | None = field(default=None, init=False)
    """By which a part lengthens a step that continues sequences, for each of its tokens, once one did."""
    part_ms: float | None = field(default=None, init=False)
    """By which it does beyond what its tokens take alone: the KV before it is laid out anew for each part."""
    alone_ms: float | None = field(default=None, init=False)
    """That a prompt's token takes in a step that continues none, once it did."""

    _beside_ago: int = field(default=0, init=False)
    """Steps since one had sequences and a part of a prompt."""
    _alone_ago: int = field(default=0, init=False)
    """Steps since one had a part of a prompt alone."""

    def step_ms(self, sequences: int) -> float:
        """Of a step without a part of a prompt; 0 until one was measured."""
        return self._slower * self._steps.ms(max(sequences, 1))

    def stepped(self, prompt_tokens: int, sequences: int, ms: float) -> None:
        """A step ended that continued so many sequences, and computed so many tokens of prompts beside."""
        self._beside_ago += 1
        self._alone_ago += 1
        ms = min(ms, OUTLIER * (self._expected_ms(prompt_tokens, sequences) or ms))
        if not prompt_tokens:
            self._steps.note(sequences, ms)
            self._steps.believe()
            if expected_ms := self._steps.ms(sequences):
                self._slower = _mixed(self._slower, ms / expected_ms)
        elif sequences:
            added_ms = max(ms - self.step_ms(sequences), 0.0)
            self.token_ms = _mixed(self.token_ms, added_ms / prompt_tokens)
            if self.alone_ms is not None:
                self.part_ms = _mixed(self.part_ms, max(added_ms - prompt_tokens * self.alone_ms, 0.0))
            self._beside_ago = 0
        elif prompt_tokens >= TRIED_TOKENS:  # a smaller part takes as long as a step, whatever it has
            self.alone_ms = _mixed(self.alone_ms, ms / prompt_tokens)
            self._alone_ago = 0
        # It may have been an odd one, by which none would be computed again.
        if self._beside_ago == KNOWN_STEPS:
            self.token_ms = self.part_ms = None
        if self._alone_ago == KNOWN_STEPS:
            self.alone_ms = None

    def _expected_ms(self, prompt_tokens: int, sequences: int) -> float:
        """Duration of such a step by those before it; 0 where nothing is known of it. A step that takes far
        longer was held up by something else: its process or another rank was stopped (`stall-is-no-work`)."""
        if not prompt_tokens:
            return self.step_ms(sequences)
        if not sequences:
            return 0.0 if self.alone_ms is None else prompt_tokens * self.alone_ms
        known = self._part_and_token_ms
        if known is None:
            return 0.0
        part_ms, token_ms = known
        return self.step_ms(sequences) + part_ms + prompt_tokens * token_ms

    @property
    def _part_and_token_ms(self) -> tuple[float, float] | None:
        """By which a part lengthens a step that continues sequences, and each of its tokens does; None where
        nothing is known of it. Until a part was measured it is believed to take all that it may by itself."""
        if self.alone_ms is None:
            return None if self.token_ms is None else (0.0, self.token_ms)
        believed_ms = min(self.gap_ms, self.alone_tokens * self.alone_ms)
        return believed_ms if self.part_ms is None else self.part_ms, self.alone_ms

    @property
    def beside_tokens(self) -> int:
        """Of prompts, in a step that holds others up."""
        known = self._part_and_token_ms
        if known is None:
            return max(min(TRIED_TOKENS, self.alone_tokens), self.least_tokens)
        part_ms, token_ms = known
        if token_ms <= 0:
            return self.alone_tokens
        return max(min(int((self.gap_ms - part_ms) / token_ms), self.alone_tokens), self.least_tokens)

    def tokens_within(self, ms: float) -> int:
        """Of prompts, in a step that continues none and takes about so many milliseconds, or is as short as
        one beside others."""
        each_ms = self.token_ms if self.alone_ms is None else self.alone_ms
        fits = int(ms / each_ms) if each_ms else 0
        return max(min(fits, self.alone_tokens), self.beside_tokens)

    def prompt_ms(self, tokens: int, sequences: int, beside_steps: int) -> float | None:
        """How long so many tokens of prompts take; None where nothing is known of it. `sequences`: that run
        beside. `beside_steps`: for how many more steps, at most."""
        steps = ceil(tokens / self.beside_tokens)
        known, step_ms = self._part_and_token_ms, self.step_ms(sequences)
        if known is None:
            return steps * TRIED_STEPS * step_ms or None
        part_ms, token_ms = known
        return min(steps, beside_steps) * (step_ms + part_ms) + tokens * token_ms


class JoiningRoom(NamedTuple):
    """A room that is handed over, and runs beside what is computed here from then on."""

    left_ms: float
    """Until then."""
    sequences: int
    steps: int
    """For how many steps it runs, at most."""


@dataclass(frozen=True, slots=True)
class ConcurrentDecode:
    """What runs beside a prompt that is computed here."""

    sequences: int
    """Now, or when prompts are computed that come before it."""
    steps: int
    """For how many more steps they run, at most."""
    joins: Sequence[JoiningRoom]
    """The next ones first."""
    sequences_max: int
    """Most that a step continues."""

    def prompt_ms(self, pace: PromptTiming, tokens: int, until_ms: float) -> float | None:
        """See `PromptTiming.prompt_ms`. It looks no further than `until_ms`."""
        sequences, joining = self.sequences, 0
        here_ms = pace.prompt_ms(tokens, sequences, self.steps)
        for each in self.joins:
            if here_ms is None or not each.left_ms < here_ms <= until_ms or sequences >= self.sequences_max:
                break
            sequences, joining = sequences + each.sequences, max(joining, each.steps)
            here_ms = pace.prompt_ms(tokens, sequences, self.steps + joining)
        return here_ms


@dataclass(frozen=True, slots=True)
class LocalPrefill:
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


def choose_local_prefill(
    pace: PromptTiming, missing: int, known: int, ahead: int, prefill_ms: float, beside: ConcurrentDecode
) -> LocalPrefill | None:
    """Of a room of `known` tokens; None: it is prefill's. `missing`: of these, in this worker's pages.
    `ahead`: tokens of other prompts that are to be computed here before it. `prefill_ms`: until prefill has
    computed it, from now on. Where no step was made yet, one is tried."""
    if not pace.gap_ms or prefill_ms <= 0:
        return None
    here_ms = beside.prompt_ms(pace, ahead + missing, prefill_ms)
    here_first = not (beside.steps or ahead) if here_ms is None else here_ms <= prefill_ms
    return LocalPrefill(missing, known, here_ms, prefill_ms) if here_first else None


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else before + WEIGHT * (now - before)
