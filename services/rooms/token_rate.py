"""How many tokens of prompts does a worker compute in a second, by its last steps?"""

from dataclasses import dataclass
from typing import Final

from baton.rooms.step_cost import OUTLIER

WINDOW_US: Final = 2_000_000
"""Of computing: what was measured before weighs less and less."""
KNOWN_MS: Final = 60_000
"""For how long it is known, while nothing is computed. Whoever chooses by it could not find out else that
the worker is faster than it was once: after that it is asked without."""


@dataclass(slots=True)
class TokenRate:
    least_tokens: int
    """A step of fewer says nothing: it takes what a step takes, however few they are."""
    _tokens: float = 0.0
    _us: float = 0.0
    _measured_ms: int = 0

    def stepped(self, tokens: int, us: int, now_ms: int, *, most: int | None = None) -> None:
        """A step ended that computed so many, and took so many microseconds. `most`: that it was left, where
        somebody else's steps leave it less than it might compute."""
        least = self.least_tokens if most is None else min(self.least_tokens, most)
        if tokens < max(least, 1) or us <= 0:
            return
        self._measured_ms = now_ms
        if self._us:  # what takes far longer was held up (`stall-is-no-work`)
            us = min(us, round(OUTLIER * tokens * self._us / self._tokens))
        self._tokens += tokens
        self._us += us
        if self._us > WINDOW_US:
            self._tokens *= WINDOW_US / self._us
            self._us = WINDOW_US

    def per_s(self, now_ms: int) -> int:
        """0: it is not known."""
        if not self._us or now_ms - self._measured_ms > KNOWN_MS:
            return 0
        return max(round(self._tokens * 1_000_000 / self._us), 1)
