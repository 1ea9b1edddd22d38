"""Which drafts does the next step check?

The same on every rank (`drafts-agreed`): all that is looked at here they share, and they do it in the same
turns.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from baton.decode.batch import ChoiceStep
from baton.decode.decode_room import Choice
from baton.decode.drafter import Drafter
from baton.engine_interface import DraftPages
from baton.rooms.draft_budget import Drafts, DraftSource, allocate_drafts
from baton.rooms.step_cost import StepCost

READ_MAX: Final = 16_384
"""Tokens of all sequences that are read beside a step: some milliseconds."""
NONE: Final[Sequence[int]] = ()
NO_PAGES: Final = {"taken": 0, "free": 0}


class DraftScheduler:
    """Of one rank."""

    def __init__(self, longest: int = 0, ahead: int = 0, pages: DraftPages | None = None) -> None:
        """`longest`: tokens of an earlier occurrence that are compared; 0: none are. `ahead`: most tokens of
        a sequence that a draft model says come next, instead; 0: there is none. `pages`: of that model, on
        the rank that has it."""
        self.on = bool(longest or ahead)
        """Something is drafted."""
        self.cost = StepCost()
        """Of a position and of a draft."""
        self._longest = longest
        self._ahead = ahead
        self._pages = pages

    def drafts(self, step: Sequence[ChoiceStep], beside: int = 0) -> Sequence[Sequence[int]]:
        """For each part of the step. `beside`: positions of prompts that it computes as well, and which
        make it longer for all: a draft adds less to that."""
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
        counts = allocate_drafts(promises, len(step), positions, self.cost.told.position)
        for place, count in zip(places, counts, strict=True):
            drafted[place] = drafted[place][:count]
        if self._ahead:
            self._want(step, positions - beside)
        return drafted

    def stepped(self, step: Sequence[ChoiceStep], ms: float) -> None:
        """It took so long, and nothing came of it yet."""
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
        """Beside a step that was started: what its sequences have before it."""
        left = READ_MAX
        for part in step if self.on else ():
            drafter = self._drafter(part)
            if drafter is not None and left:
                left -= drafter.read(left)

    def over(self, choices: Iterable[Choice]) -> None:
        """Nothing is drafted for them any more."""
        for choice in choices:
            if self._pages is not None and choice.sequence.proposal is not None:
                self._pages.release(choice.sequence.proposal)

    def census(self) -> Mapping[str, int]:
        """Pages of the draft model, by state."""
        return NO_PAGES if self._pages is None else self._pages.census()

    def _want(self, step: Sequence[ChoiceStep], positions: int) -> None:
        """Of the draft model, for the step behind this one."""
        drafters = [each for part in step if (each := part.choice.drafter) is not None]
        promises = [Drafts(each.acceptance, each.ahead) for each in drafters]
        cost = self.cost.told.position + self.cost.told.draft
        for drafter, count in zip(
            drafters, allocate_drafts(promises, len(step), positions, cost), strict=True
        ):
            if drafter.proposal is not None:
                drafter.proposal.wanted = count

    def _drafter(self, part: ChoiceStep) -> Drafter | None:
        """Of a choice that goes on, where its request does not want none."""
        choice = part.choice
        if choice.drafter is None and choice.sequence.request.speculates:
            choice.drafter = Drafter(choice.sequence, self._longest, self._ahead)
        return None if choice.forks else choice.drafter
