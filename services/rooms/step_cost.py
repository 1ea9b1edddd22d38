"""What does one more position take of a step's time, and one whose logits score a prompt's token?

Scoring a token takes the head's product over the whole vocabulary, a softmax and a search for the likeliest.
With a small model and a large vocabulary that is many times the token itself. A step counts it
(`counted-work`).

Machines differ, and so do the ranks of a worker. So the numbers are agreed: the leader reads them off its own
steps, and all ranks go by that. `StepCost.ms` is for the leader's own use.
"""

from typing import Final, NamedTuple


class Costs(NamedTuple):
    """In thousandths of the time of a step of no position."""

    position: int
    """Of one more position."""
    draft: int
    """Of a token that a draft model says, beside its position."""
    scored: int
    """Of a prompt's token that is scored, beside its position."""

    @property
    def score_price(self) -> int:
        """Thousandths of a position's cost that scoring one position adds to it."""
        return min(1000 * self.scored // max(self.position, 1), SCORE_PRICE_MAX)

    def tokens(self, positions: int, scored: int) -> int:
        """How many positions that are not scored cost as much as so many, of which some are scored."""
        return positions + scored * self.score_price // 1000

    @property
    def fixed_tokens(self) -> int:
        """So many positions take as long as a step of none."""
        return 1000 // max(self.position, 1)


SCORE_PRICE_MAX: Final = 64_000
"""A step scores some tokens at least, whatever was measured."""
BEFORE: Final = Costs(150, 150, 150)
"""Until it was measured: what CPUs and small models show."""
PROMPTS: Final = Costs(1, 1, 1)
"""The same of steps that compute prompts: nothing is spared by small ones. Scoring a token costs as much as
computing it."""
PROMPTS_ALIKE: Final = 0.125
"""Of their mean. Steps of prompts that differ by less are alike: their times tell of all but lengths."""
SENT_STEPS: Final = 16
"""Between two times that it is told."""
SHARE_MIN: Final = 0.02
"""Of the last step, in all that is remembered."""
OUTLIER: Final = 3
"""Times what it takes by the line: whatever held a step up for longer, it was not its positions
(`stall-is-no-work`)."""
MOST: Final = 10_000


class StepCost:
    """A plane through the leader's steps, by their positions and by how many of these are scored. The last
    steps weigh most. Where all were alike it stays near what was believed before."""

    def __init__(self, before: Costs = BEFORE, alike: float = 0.0) -> None:
        """`before`: what is believed until it was measured. `alike`: steps that differ in positions by less
        of their mean say nothing."""
        self.told = before
        """Agreed: what all ranks go by."""
        self._sent = before
        self._alike = alike
        self._steps = 0
        self._positions = self._scored = self._ms = 0.0
        self._spread = self._scored_spread = self._both = 0.0
        """Variances of positions and of scored ones, and their covariance."""
        self._joint = self._scored_joint = 0.0
        """Covariances of each with the time."""
        self._since = 0
        self._draft_ms: float | None = None

    def note(self, positions: int, ms: float, scored: int = 0) -> None:
        """A step of so many positions, of which `scored` score a prompt's token, took so long, without what a
        draft model took."""
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
        """A draft model took so long for each token that it said."""
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
        """Milliseconds of one more position, and of one more that is scored beside its position.

        Least squares, with what was believed before as one more measurement (ridge regression).
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
        """Of a step of so many positions, none of them scored; 0 until one was measured."""
        if not self._ms:
            return 0.0
        each, score = self._slopes
        plain_ms = self._ms - score * self._scored
        return max(plain_ms + each * (positions - self._positions), 0.05 * self._ms)

    def believe(self) -> None:
        """What was measured is what holds from now on where steps are alike. For who tells nobody."""
        self.news()

    def news(self) -> Costs | None:
        """What all ranks are to go by from now on, where it is something else; said once."""
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
