"""Choice of the draft tokens that the next step verifies (speculative decoding).

The choice is the same on every rank (`drafts-agreed`): it uses only data that the ranks share, in the same
turns.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from baton.decode.batch import ChoiceStep
from baton.decode.drafter import Drafter
from baton.engine_interface import DraftPages
from baton.rooms.steps.draft_budget import Drafts, DraftSource, allocate_drafts
from baton.rooms.steps.step_cost import StepCost

READ_MAX: Final = 16_384
"""Most tokens, over all sequences, that are indexed for n-gram lookup while a step runs. That takes some
milliseconds."""
NONE: Final[Sequence[int]] = ()
NO_PAGES: Final = {"taken": 0, "free": 0}


class DraftScheduler:
    """Scheduler that chooses the draft tokens for all sequences of one rank."""

    def __init__(self, longest: int = 0, ahead: int = 0, pages: DraftPages | None = None) -> None:
        """Make a scheduler.

        `longest`: length in tokens of the suffix that n-gram lookup compares, or 0 without lookup. `ahead`:
        most tokens that a draft model makes for one sequence, or 0. A draft model replaces the lookup.
        `pages`: KV pages of the draft model, on the rank that has it.
        """
        self.on = bool(longest or ahead)
        """Whether draft tokens are made at all, by n-gram lookup or by a draft model."""
        self.cost = StepCost()
        """Measured costs of one more position in a step, and of one token of the draft model."""
        self._longest = longest
        self._ahead = ahead
        self._pages = pages

    def drafts(self, step: Sequence[ChoiceStep], beside: int = 0) -> Sequence[Sequence[int]]:
        """Return the draft tokens of each part of the next step, as one list for each part.

        `beside`: number of prompt positions in the same step. They make the step longer, so that a draft
        token adds relatively less.
        """
        drafted = [NONE] * len(step)
        if not self.on:
            return drafted
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
        positions = beside + sum(part.positions for part in step)
        counts = allocate_drafts(promises, len(step), positions, self.cost.agreed.position)
        for place, count in zip(places, counts, strict=True):
            drafted[place] = drafted[place][:count]
        if self._ahead:
            self._want(step, positions - beside)
        return drafted

    def stepped(self, step: Sequence[ChoiceStep], ms: float) -> None:
        """Record that a decode step took `ms` milliseconds. Call it before the step's results are applied."""
        if not self.on or not step or any(part.choice.forks for part in step):
            return
        proposals = [each for part in step if (each := part.choice.sequence.proposal) is not None]
        spent_us = max((each.spent_us for each in proposals), default=0)
        draft_us = max((each.draft_us for each in proposals), default=0)
        positions = sum(part.positions + part.choice.checking for part in step)
        self.cost.note(positions, ms - spent_us / 1000)
        if draft_us:
            self.cost.drafted(draft_us / 1000)

    def read(self, step: Sequence[ChoiceStep]) -> None:
        """Index the known tokens of the step's sequences for n-gram lookup, while the step runs."""
        left = READ_MAX
        for part in step if self.on else ():
            drafter = self._drafter(part)
            if drafter is not None and left:
                left -= drafter.read(left)

    def census(self) -> Mapping[str, int]:
        """Return the number of KV pages of the draft model, by state (`taken`, `free`)."""
        return NO_PAGES if self._pages is None else self._pages.census()

    def _want(self, step: Sequence[ChoiceStep], positions: int) -> None:
        """Set how many tokens the draft model makes for each sequence, for the step after the next one."""
        drafters = [each for part in step if (each := part.choice.drafter) is not None]
        promises = [Drafts(each.acceptance, each.ahead) for each in drafters]
        cost = self.cost.agreed.position + self.cost.agreed.draft
        for drafter, count in zip(
            drafters, allocate_drafts(promises, len(step), positions, cost), strict=True
        ):
            if drafter.proposal is not None:
                drafter.proposal.wanted = count

    def _drafter(self, part: ChoiceStep) -> Drafter | None:
        """Return the object that makes draft tokens for a choice. None if the request wants no drafts, or the
        choice has sampled no token yet."""
        choice = part.choice
        if choice.drafter is None and choice.sequence.request.speculates:
            choice.drafter = Drafter(choice.sequence, self._longest, self._ahead)
        return None if choice.forks else choice.drafter
