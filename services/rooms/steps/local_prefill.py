"""Choice of a room's prefill: by its decode worker itself, or by a prefill worker.

The one that is expected to finish sooner does it (`mine-or-granted`). Decode computes a prompt in parts
within steps of running sequences, and each part may delay these for a bounded time. At a prefill worker the
prompt waits for those before it. Tokens cached on decode are not computed. So decode computes
the short new parts of long conversations. While prefill workers are busier, it computes long prompts, too.

The leader decides by its own clock, and all ranks get the decision as a command. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final, NamedTuple

from baton.rooms.steps.step_cost import OUTLIER, StepCost

WEIGHT: Final = 0.2
"""Weight of the last step in running means of step times."""
TRIED_TOKENS: Final = 64
"""Prompt tokens in a step while their duration is unknown."""
KNOWN_STEPS: Final = 1000
"""Steps of other kinds after which the measurement of one kind is dropped."""
TRIED_STEPS: Final = 2
"""Assumed duration of a step with prompt tokens, in plain steps, until one was measured."""


@dataclass(slots=True)
class PromptTiming:
    """Measured duration of prompt parts in this worker's steps."""

    gap_ms: float
    """Longest time that a part may delay running sequences, in milliseconds. With 0, decode computes only
    prompts without a prefill worker."""
    alone_tokens: int
    """Prompt tokens in a step that delays no sequence."""
    least_tokens: int
    """Least prompt tokens in any step that has some."""
    _steps: StepCost = field(default_factory=StepCost, init=False)
    """Cost of steps without prompt tokens, by their sequences."""
    _slower: float = field(default=1.0, init=False)
    """Duration of the last steps, as a multiple of what `_steps` predicts. It grows with the length of the
    KV."""
    token_ms: float | None = field(default=None, init=False)
    """Milliseconds that each prompt token adds to a step with sequences, once measured."""
    part_ms: float | None = field(default=None, init=False)
    """Milliseconds that a part adds beyond its tokens, since the KV before it is laid out anew for each
    part."""
    alone_ms: float | None = field(default=None, init=False)
    """Milliseconds of a prompt token in a step without sequences, once measured."""

    _beside_ago: int = field(default=0, init=False)
    """Steps since the last one with both sequences and prompt tokens."""
    _alone_ago: int = field(default=0, init=False)
    """Steps since the last one with prompt tokens only."""

    def step_ms(self, sequences: int) -> float:
        """Return the duration of a step without prompt tokens, in milliseconds; 0 until one was measured."""
        return self._slower * self._steps.ms(max(sequences, 1))

    def stepped(self, prompt_tokens: int, sequences: int, ms: float) -> None:
        """Record a finished step: `sequences` decoded rows, `prompt_tokens` prefilled in the same step, and
        its duration in milliseconds."""
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
        """Return the predicted duration of such a step, in milliseconds; 0 if unknown. A far longer step was
        delayed by something else, such as a stopped process (`stall-is-no-work`)."""
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
        """Milliseconds that a part adds to a step with sequences, and that each of its tokens adds. None if
        unknown. Until a part was measured, it is assumed to take all the time that it may."""
        if self.alone_ms is None:
            return None if self.token_ms is None else (0.0, self.token_ms)
        believed_ms = min(self.gap_ms, self.alone_tokens * self.alone_ms)
        return believed_ms if self.part_ms is None else self.part_ms, self.alone_ms

    @property
    def beside_tokens(self) -> int:
        """Prompt tokens in a step that delays sequences."""
        known = self._part_and_token_ms
        if known is None:
            return max(min(TRIED_TOKENS, self.alone_tokens), self.least_tokens)
        part_ms, token_ms = known
        if token_ms <= 0:
            return self.alone_tokens
        return max(min(int((self.gap_ms - part_ms) / token_ms), self.alone_tokens), self.least_tokens)

    def tokens_within(self, ms: float) -> int:
        """Return the prompt tokens of a step without sequences that takes about `ms` milliseconds, or is as
        short as one with sequences."""
        each_ms = self.token_ms if self.alone_ms is None else self.alone_ms
        fits = int(ms / each_ms) if each_ms else 0
        return max(min(fits, self.alone_tokens), self.beside_tokens)

    def prompt_ms(self, tokens: int, sequences: int, beside_steps: int) -> float | None:
        """Return the time to prefill `tokens` prompt tokens, in milliseconds. None if unknown. `sequences`:
        rows decoded in the same steps. `beside_steps`: most further steps that they run for."""
        steps = ceil(tokens / self.beside_tokens)
        known, step_ms = self._part_and_token_ms, self.step_ms(sequences)
        if known is None:
            return steps * TRIED_STEPS * step_ms or None
        part_ms, token_ms = known
        return min(steps, beside_steps) * (step_ms + part_ms) + tokens * token_ms


class JoiningRoom(NamedTuple):
    """A room that is handed over meanwhile, and decodes in the same steps from then on."""

    left_ms: float
    """Time until then, in milliseconds."""
    sequences: int
    steps: int
    """Most steps that it runs for."""


@dataclass(frozen=True, slots=True)
class ConcurrentDecode:
    """Sequences that decode while a prompt is computed here."""

    sequences: int
    """Running sequences, now or when earlier prompts are computed."""
    steps: int
    """Most further steps that they run for."""
    joins: Sequence[JoiningRoom]
    """Rooms that join, the next one first."""
    sequences_max: int
    """Most sequences of a step."""

    def prompt_ms(self, pace: PromptTiming, tokens: int, until_ms: float) -> float | None:
        """Return the time to prefill a prompt among these sequences. See `PromptTiming.prompt_ms`. It looks
        no further than `until_ms`."""
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
    """Reason for computing a room's prompt on decode."""

    missing_tokens: int
    known_tokens: int
    here_ms: float | None
    """Time until its first token on decode, in milliseconds. None if unknown."""
    prefill_ms: float
    """Time until its first token on prefill, in milliseconds."""

    def __str__(self) -> str:
        missing = f"{self.missing_tokens:,} of {self.known_tokens:,} tokens are missing here"
        here = "not known yet how long that takes" if self.here_ms is None else f"{self.here_ms:.0f} ms"
        return f"{missing}: {here}, where prefill would take {self.prefill_ms:.0f} ms"


def choose_local_prefill(
    pace: PromptTiming, missing: int, known: int, ahead: int, prefill_ms: float, beside: ConcurrentDecode
) -> LocalPrefill | None:
    """Return why decode computes the prompt of a room with `known` tokens, or None if prefill does.

    `missing`: tokens without cached pages here. `ahead`: tokens of other prompts to compute here first.
    `prefill_ms`: expected time of prefill. One step is tried if none was measured yet.
    """
    if not pace.gap_ms or prefill_ms <= 0:
        return None
    here_ms = beside.prompt_ms(pace, ahead + missing, prefill_ms)
    here_first = not (beside.steps or ahead) if here_ms is None else here_ms <= prefill_ms
    return LocalPrefill(missing, known, here_ms, prefill_ms) if here_first else None


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else before + WEIGHT * (now - before)
