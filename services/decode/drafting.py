"""Which drafts does the next step check?

The same on every rank (`drafts-agreed`): all that is looked at here they share, and they do it in the same
turns.
"""

from collections.abc import Sequence
from typing import Final

from services.decode.batch import ChoiceStep
from services.decode.drafter import Drafter
from services.rooms.drafting import Drafts, DraftSource, allot
from services.rooms.step_cost import BEFORE_PER_MILLE, StepCost

READ_MAX: Final = 16_384
"""Tokens of all sequences that are read beside a step: some milliseconds."""
NONE: Final[Sequence[int]] = ()


class Drafting:
    """Of one rank."""

    def __init__(self, longest: int) -> None:
        """`longest`: tokens of an earlier occurrence that are compared; 0: nothing is drafted."""
        self.longest = longest
        self.per_mille = BEFORE_PER_MILLE
        """Of the time of a step of none, what one position more takes: agreed."""
        self.cost = StepCost()
        """By this rank's own steps."""

    def drafts(self, step: Sequence[ChoiceStep]) -> Sequence[Sequence[int]]:
        """For each part of the step."""
        if not self.longest:
            return [NONE] * len(step)
        drafted = [NONE] * len(step)
        places: list[int] = []
        promises: list[Drafts] = []
        for place, part in enumerate(step):
            drafter = self._drafter(part)
            if drafter is None:
                continue
            drafted[place] = drafter.drafts()
            available, forced = len(drafted[place]), drafter.source is DraftSource.GRAMMAR
            places.append(place)
            promises.append(Drafts(drafter.acceptance, available, available if forced else 0))
        positions = sum(part.positions for part in step)
        for place, count in zip(places, allot(promises, len(step), positions, self.per_mille), strict=True):
            drafted[place] = drafted[place][:count]
        return drafted

    def stepped(self, step: Sequence[ChoiceStep], ms: float) -> None:
        """It took so long, and nothing came of it yet."""
        if self.longest and step and not any(part.choice.forks for part in step):
            self.cost.note(sum(part.positions + part.choice.checking for part in step), ms)

    def read(self, step: Sequence[ChoiceStep]) -> None:
        """Beside a step that was started: what its sequences have before it."""
        left = READ_MAX
        for part in step if self.longest else ():
            drafter = self._drafter(part)
            if drafter is not None and left:
                left -= drafter.read(left)

    def _drafter(self, part: ChoiceStep) -> Drafter | None:
        """Of a choice that goes on, where its request does not want none."""
        choice = part.choice
        if choice.drafter is None and choice.sequence.request.speculates:
            choice.drafter = Drafter(choice.sequence, self.longest)
        return None if choice.forks else choice.drafter
