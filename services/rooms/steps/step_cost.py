"""Cost of a step's positions, and of scoring prompt tokens, relative to an empty step.

Scoring a token takes the head's product over the whole vocabulary, a softmax and a top-k search. With a small
model and a large vocabulary that costs many times the token itself. So a step's size includes it
(`counted-work`).

Machines differ, and so do the ranks of a worker. The leader (first rank) measures its own steps, and all
ranks use its numbers. `StepCost.ms` is for the leader alone.
"""

from typing import Final, NamedTuple


class Costs(NamedTuple):
    """Costs of the parts of an engine step, in thousandths of the time of a step without positions."""

    position: int
    """Cost of one more position in a step, in thousandths of the time of an empty step."""
    draft: int
    """Cost of one token of a draft model, in addition to its position in the step."""
    scored: int
    """Cost of scoring one prompt token (computing its log-probability), in addition to its position."""

    @property
    def score_price(self) -> int:
        """Cost of scoring one position, in thousandths of a position's cost."""
        return min(1000 * self.scored // max(self.position, 1), SCORE_PRICE_MAX)

    def tokens(self, positions: int, scored: int) -> int:
        """Return the cost of `positions` positions, of which `scored` are scored, as a number of plain
        positions."""
        return positions + scored * self.score_price // 1000

    @property
    def fixed_tokens(self) -> int:
        """Number of positions that cost as much as an empty step."""
        return 1000 // max(self.position, 1)


SCORE_PRICE_MAX: Final = 64_000
"""Most that scoring one token may count as, in thousandths of a position's cost. The bound lets a step score
some tokens, whatever was measured."""
BEFORE: Final = Costs(150, 150, 150)
"""Costs that are assumed before the first measurement. They are typical of CPUs and small models."""
PROMPTS: Final = Costs(1, 1, 1)
"""Costs of prefill steps that are assumed before the first measurement. Small steps save nothing, and scoring
a token costs as much as computing it."""
PROMPTS_ALIKE: Final = 0.125
"""Relative difference in size below which prefill steps count as equally large. Below it, times differ for
other reasons than size."""
SENT_STEPS: Final = 16
"""Number of steps between two broadcasts of the costs to all ranks."""
SHARE_MIN: Final = 0.02
"""Least weight of the last step in the running means of step times."""
OUTLIER: Final = 3
"""Largest ratio of a step's measured time to its predicted time. A longer step was delayed by something else,
and counts as this much (`stall-is-no-work`)."""
MOST: Final = 10_000


class StepCost:
    """Linear fit of the leader's step times over the numbers of positions and of scored positions. The last
    steps weigh most. If all steps were equally large, the fit stays near the costs assumed before."""

    def __init__(self, before: Costs = BEFORE, alike: float = 0.0) -> None:
        """Make a fit without measurements. `before`: costs that are assumed until then. `alike`: relative
        difference in positions below which steps count as equally large."""
        self.agreed = before
        """Costs that all ranks use now. The leader measured them and sent them to all ranks."""
        self._sent = before
        self._alike = alike
        self._steps = 0
        self._positions = self._scored = self._ms = 0.0
        self._spread = self._scored_spread = self._both = 0.0
        """Variance of the number of positions. Then follow the variance of the number of scored positions,
        and the covariance of the two."""
        self._joint = self._scored_joint = 0.0
        """Covariance of the number of positions with the step time. Then follows that of the number of scored
        positions."""
        self._since = 0
        self._draft_ms: float | None = None

    def note(self, positions: int, ms: float, scored: int = 0) -> None:
        """Record a measured step. `positions`: its number of positions, of which `scored` scored a prompt
        token. `ms`: its duration without the draft model, in milliseconds."""
        self._steps += 1
        self._since += 1
        share = max(1 / self._steps, SHARE_MIN)
        wide, dear = positions - self._positions, scored - self._scored
        if self._steps > 1:
            each, score = self._slopes
            ms = min(ms, OUTLIER * (self._ms + max(wide, 0) * each + max(dear, 0) * score))
        long = ms - self._ms
        self._positions += share * wide
        self._scored += share * dear
        self._ms += share * long
        self._spread = (1 - share) * (self._spread + share * wide * wide)
        self._scored_spread = (1 - share) * (self._scored_spread + share * dear * dear)
        self._both = (1 - share) * (self._both + share * wide * dear)
        self._joint = (1 - share) * (self._joint + share * wide * long)
        self._scored_joint = (1 - share) * (self._scored_joint + share * dear * long)

    def drafted(self, ms: float) -> None:
        """Record the time that a draft model took, in milliseconds per draft token."""
        before = ms if self._draft_ms is None else self._draft_ms
        self._draft_ms = before + SHARE_MIN * (min(ms, OUTLIER * before) - before)

    @property
    def costs(self) -> Costs:
        if not self._ms:
            return self._sent
        each, score = self._slopes
        rest = max(self._ms - each * self._positions - score * self._scored, 0.05 * self._ms)
        draft = self._sent.draft if self._draft_ms is None else _share(self._draft_ms, rest)
        return Costs(_share(each, rest), draft, _share(score, rest))

    @property
    def _slopes(self) -> tuple[float, float]:
        """Estimated time of one more position, and of scoring one more position, in milliseconds.

        Least squares, with the costs assumed before as one more measurement (ridge regression).
        """
        each, score = self._sent.position / 1000, self._sent.scored / 1000
        fixed_ms = self._ms / (1 + each * self._positions + score * self._scored)
        weight = max((self._alike * self._positions) ** 2, 1.0)
        weight_scored = max((self._alike * self._scored) ** 2, 1.0)
        a, b, c = self._spread + weight, self._both, self._scored_spread + weight_scored
        x = self._joint + weight * each * fixed_ms
        y = self._scored_joint + weight_scored * score * fixed_ms
        if c * x <= b * y:
            return 0.0, max(y / c, 0.0)
        if a * y <= b * x:
            return max(x / a, 0.0), 0.0
        return (c * x - b * y) / (a * c - b * b), (a * y - b * x) / (a * c - b * b)

    def ms(self, positions: int) -> float:
        """Return the predicted duration of a step of `positions` positions without scoring, in milliseconds;
        0 until one was measured."""
        if not self._ms:
            return 0.0
        each, score = self._slopes
        plain_ms = self._ms - score * self._scored
        return max(plain_ms + each * (positions - self._positions), 0.05 * self._ms)

    def believe(self) -> None:
        """Use the measured costs from now on, without sending them to other ranks. For a worker of one
        rank."""
        self.news()

    def news(self) -> Costs | None:
        """Return the measured costs if they have changed so much that all ranks have to get them. Otherwise
        return None. Each change is returned once."""
        if self._since < SENT_STEPS:
            return None
        self._since = 0
        now = self.costs
        if all(abs(one - other) * 8 < other for one, other in zip(now, self._sent, strict=True)):
            return None
        self._sent = now
        return now


def _share(ms: float, of_ms: float) -> int:
    return min(max(round(1000 * ms / of_ms), 1), MOST)
