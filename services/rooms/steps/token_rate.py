"""Prefill throughput of a worker, in prompt tokens per second, measured over its last steps."""

from dataclasses import dataclass
from typing import Final

from baton.rooms.steps.step_cost import OUTLIER

WINDOW_US: Final = 2_000_000
"""Length of the measurement window, in microseconds of computing. Older measurements weigh less."""
KNOWN_MS: Final = 60_000
"""Time for which the rate stays known while no prompt is computed, in milliseconds. After that, the router
places prompts without it, since the worker may have become faster."""


@dataclass(slots=True)
class TokenRate:
    least_tokens: int
    """Fewest prompt tokens in a step that is measured. Smaller steps take as long as a step of this size."""
    _tokens: float = 0.0
    _us: float = 0.0
    _measured_ms: int = 0

    def stepped(self, tokens: int, us: int, now_ms: int, *, most: int | None = None) -> None:
        """Record a step that computed `tokens` prompt tokens in `us` microseconds. `most`: most tokens that
        it could have, if other work in the same step limits them."""
        least = self.least_tokens if most is None else min(self.least_tokens, most)
        if tokens < max(least, 1) or us <= 0:
            return
        self._measured_ms = now_ms
        if self._us:  # a far longer step was delayed (`stall-is-no-work`)
            us = min(us, round(OUTLIER * tokens * self._us / self._tokens))
        self._tokens += tokens
        self._us += us
        if self._us > WINDOW_US:
            self._tokens *= WINDOW_US / self._us
            self._us = WINDOW_US

    def per_s(self, now_ms: int) -> int:
        """Return the throughput in prompt tokens per second; 0 if unknown."""
        if not self._us or now_ms - self._measured_ms > KNOWN_MS:
            return 0
        return max(round(self._tokens * 1_000_000 / self._us), 1)
