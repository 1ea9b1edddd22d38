"""Choice of where a room's prompt is computed: on its decode worker, or on a prefill worker.

The worker that is expected to finish sooner computes it (`mine-or-granted`). Decode computes a prompt in
parts, in the same steps as running sequences, and each part may delay these for a bounded time. At a prefill
worker the prompt waits for those before it. Tokens cached on decode are not computed. So decode computes the
short new parts of long conversations. While prefill workers are busier, it computes long prompts, too.

The leader (first rank) decides by its own clock, and all ranks get the decision as a command. The module is
pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final, NamedTuple

from baton.rooms.steps.step_cost import OUTLIER, StepCost

WEIGHT: Final = 0.2
"""Weight of the last step in the running means of step times."""
TRIED_TOKENS: Final = 64
"""Number of prompt tokens in a step as long as the time per token is not known."""
KNOWN_STEPS: Final = 1000
"""Number of steps after which a measurement is dropped, if no step of its kind came in between."""
TRIED_STEPS: Final = 2
"""Assumed ratio of the duration of a step with prompt tokens to that of a step without, until one was
measured."""


@dataclass(slots=True)
class PromptTiming:
    """Measured duration of prompt parts that this decode worker computes in its steps."""

    gap_ms: float
    """Longest time by which a prompt part may delay running sequences, in milliseconds. With 0, decode
    computes only prompts for which there is no prefill worker."""
    alone_tokens: int
    """Most prompt tokens in a step without running sequences."""
    least_tokens: int
    """Fewest prompt tokens in a step that computes a prompt part."""
    _steps: StepCost = field(default_factory=StepCost, init=False)
    """Measured cost of steps without prompt tokens, by their number of sequences."""
    _slower: float = field(default=1.0, init=False)
    """Ratio of the last steps' durations to those that `_steps` predicts. It grows with the length of the
    KV."""
    token_ms: float | None = field(default=None, init=False)
    """Time that each prompt token adds to a step with running sequences, in milliseconds. None until
    measured."""
    part_ms: float | None = field(default=None, init=False)
    """Fixed time in milliseconds that a part of a prompt adds to a step, in addition to the time of its
    tokens. In it, the engine lays out the KV before the part. None until measured."""
    alone_ms: float | None = field(default=None, init=False)
    """Time of each prompt token in a step without running sequences, in milliseconds. None until measured."""

    _beside_ago: int = field(default=0, init=False)
    """Number of steps since the last step that had both running sequences and prompt tokens."""
    _alone_ago: int = field(default=0, init=False)
    """Number of steps since the last step that had prompt tokens only."""

    def step_ms(self, sequences: int) -> float:
        """Return the duration of a step without prompt tokens, in milliseconds; 0 until one was measured."""
        return self._slower * self._steps.ms(max(sequences, 1))

    def stepped(self, prompt_tokens: int, sequences: int, ms: float) -> None:
        """Record a finished step: its number of decoding `sequences`, its number of `prompt_tokens`, and its
        duration in milliseconds."""
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
        elif prompt_tokens >= TRIED_TOKENS:  # a smaller part takes as long as a whole step
            self.alone_ms = _mixed(self.alone_ms, ms / prompt_tokens)
            self._alone_ago = 0
        # The measured step may have been unusually slow. Then no prompt would be computed here any more.
        if self._beside_ago == KNOWN_STEPS:
            self.token_ms = self.part_ms = None
        if self._alone_ago == KNOWN_STEPS:
            self.alone_ms = None

    def _expected_ms(self, prompt_tokens: int, sequences: int) -> float:
        """Return the predicted duration of a step with `prompt_tokens` and decoding `sequences`, in
        milliseconds; 0 if unknown. A far longer step was delayed by something else, such as a stopped process
        (`stall-is-no-work`)."""
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
        """Times that a part of a prompt adds to a step with running sequences, in milliseconds: a fixed time,
        and a time for each token.

        None if unknown. Until a part was measured, its fixed time is assumed to be the longest that is
        allowed.
        """
        if self.alone_ms is None:
            return None if self.token_ms is None else (0.0, self.token_ms)
        believed_ms = min(self.gap_ms, self.alone_tokens * self.alone_ms)
        return believed_ms if self.part_ms is None else self.part_ms, self.alone_ms

    @property
    def beside_tokens(self) -> int:
        """Most prompt tokens in a step with running sequences, such that it delays them by `gap_ms` at
        most."""
        known = self._part_and_token_ms
        if known is None:
            return max(min(TRIED_TOKENS, self.alone_tokens), self.least_tokens)
        part_ms, token_ms = known
        if token_ms <= 0:
            return self.alone_tokens
        return max(min(int((self.gap_ms - part_ms) / token_ms), self.alone_tokens), self.least_tokens)

    def tokens_within(self, ms: float) -> int:
        """Return how many prompt tokens a step without running sequences computes in about `ms` milliseconds.
        It is at least the number in a step with running sequences."""
        each_ms = self.token_ms if self.alone_ms is None else self.alone_ms
        fits = int(ms / each_ms) if each_ms else 0
        return max(min(fits, self.alone_tokens), self.beside_tokens)

    def prompt_ms(self, tokens: int, sequences: int, beside_steps: int) -> float | None:
        """Return the time to prefill `tokens` prompt tokens on this decode worker, in milliseconds. None if
        unknown.

        `sequences`: number that decode in the same steps. `beside_steps`: most further steps that these run
        for.
        """
        steps = ceil(tokens / self.beside_tokens)
        known, step_ms = self._part_and_token_ms, self.step_ms(sequences)
        if known is None:
            return steps * TRIED_STEPS * step_ms or None
        part_ms, token_ms = known
        return min(steps, beside_steps) * (step_ms + part_ms) + tokens * token_ms


class JoiningRoom(NamedTuple):
    """Room that prefill hands over while decode computes a prompt. From then on it decodes in the same
    steps."""

    left_ms: float
    """Milliseconds until the room is expected to be handed over."""
    sequences: int
    steps: int
    """Largest number of steps that the room decodes for after its hand-over."""


@dataclass(frozen=True, slots=True)
class ConcurrentDecode:
    """Sequences that decode while this worker computes a prompt in the same steps."""

    sequences: int
    """Number of sequences that decode now, or will decode when earlier prompts are computed."""
    steps: int
    """Largest number of further steps for which one of the running sequences decodes."""
    joins: Sequence[JoiningRoom]
    """Rooms whose hand-over is expected while the prompt is computed, the soonest first."""
    sequences_max: int
    """Most sequences that one step of this worker decodes."""

    def prompt_ms(self, pace: PromptTiming, tokens: int, until_ms: float) -> float | None:
        """Return the time to prefill a prompt of `tokens` on decode while these sequences run, in
        milliseconds. None if unknown. Rooms that join later than `until_ms` are ignored. See
        `PromptTiming.prompt_ms`."""
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
    """Numbers for which decode computes a room's prompt itself: the expected times of either choice."""

    missing_tokens: int
    known_tokens: int
    here_ms: float | None
    """Expected time until the first token if decode computes the prompt, in milliseconds. None if unknown."""
    prefill_ms: float
    """Expected time until the first token if the prefill worker computes the prompt, in milliseconds."""

    def __str__(self) -> str:
        missing = f"{self.missing_tokens:,} of {self.known_tokens:,} tokens are missing here"
        here = "not known yet how long that takes" if self.here_ms is None else f"{self.here_ms:.0f} ms"
        return f"{missing}: {here}, where prefill would take {self.prefill_ms:.0f} ms"


def choose_local_prefill(
    pace: PromptTiming, missing: int, known: int, ahead: int, prefill_ms: float, beside: ConcurrentDecode
) -> LocalPrefill | None:
    """Decide whether decode computes a room's prompt itself. Return the reason if it does, or None if prefill
    does.

    `missing`: number of prompt tokens without cached pages on decode, of `known` in all. `ahead`: tokens of
    other prompts to compute on decode first. `prefill_ms`: expected time of prefill. `beside`: sequences that
    decode meanwhile. If no prompt was measured on decode yet, one is tried while nothing else runs.
    """
    if not pace.gap_ms or prefill_ms <= 0:
        return None
    here_ms = beside.prompt_ms(pace, ahead + missing, prefill_ms)
    here_first = not (beside.steps or ahead) if here_ms is None else here_ms <= prefill_ms
    return LocalPrefill(missing, known, here_ms, prefill_ms) if here_first else None


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else before + WEIGHT * (now - before)
