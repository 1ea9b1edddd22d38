"""What may come next in each sequence of a step, so that the next step can check it?

Where a grammar leaves one token alone, that token is drawn whatever its logits are, and so is the next one,
as far as the grammar goes on so: the names of a schema's properties, mostly. Elsewhere a draft model may say
what comes. The rank that draws knows both, since it folds the outputs and has that model. It tells the others
with the step, so that all draft the same (`drafts-agreed`).
"""

from collections import abc
from typing import Final, NamedTuple

from baton.engine.ranks.collectives import Team
from baton.engine_interface import PROPOSED_MAX, Proposal, Row, RowResult, Sequence
from baton.grammars.fold import GrammarLost
from baton.sampling.draft_model import DraftModel, DraftRequest, DraftTimes

_WORDS: Final = 2 + PROPOSED_MAX
"""Of a proposal: how many tokens, how many of them are forced, and the tokens."""


class _Proposed(NamedTuple):
    sequence: Sequence
    proposal: Proposal
    output: list[int]
    """All that is drawn, by the step as well; empty behind an answer's end, and where nothing was drawn."""


class Proposer:
    """Of one rank."""

    def __init__(self, team: Team, drawer: int, model: DraftModel | None = None) -> None:
        """`drawer`: the rank that draws. `model`: drafts there what no grammar forces."""
        self._team = team
        self._drawer = drawer
        self._model = model

    def propose(self, rows: abc.Sequence[Row], taken: abc.Sequence[RowResult]) -> None:
        """Make anew what the sequences of `rows` have for it, behind what was `taken` of each."""
        asked = [
            _Proposed(row.sequence, row.sequence.proposal, _output(row.sequence, tokens))
            for row, tokens in zip(rows, taken, strict=True)
            if row.sample and row.sequence.proposal is not None
        ]
        if not asked:
            return
        words = self._words(asked) if self._team.rank == self._drawer else None
        spent_us, draft_us, *told = self._team.tell(self._drawer, words, 2 + _WORDS * len(asked))
        for place, each in enumerate(asked):
            count, forced, *tokens = map(int, told[_WORDS * place : _WORDS * (place + 1)])
            proposal = each.proposal
            proposal.tokens, proposal.forced = tuple(tokens[:count]), forced
            proposal.spent_us, proposal.draft_us = int(spent_us), int(draft_us)

    def _words(self, asked: abc.Sequence[_Proposed]) -> list[float]:
        forced = [_forced(each) for each in asked]
        drafted, times = self._drafted(asked, forced)
        words: list[float] = [*times]
        for certain, guessed in zip(forced, drafted, strict=True):
            tokens = certain or guessed
            words += [len(tokens), len(certain), *tokens]
            words += [0.0] * (PROPOSED_MAX - len(tokens))
        return words

    def _drafted(
        self, asked: abc.Sequence[_Proposed], forced: abc.Sequence[list[int]]
    ) -> tuple[abc.Sequence[list[int]], DraftTimes]:
        """By the draft model, behind each that nothing is forced behind."""
        if self._model is None or not any(each.proposal.wanted for each in asked):
            return [[]] * len(asked), DraftTimes()
        return self._model.propose(
            [
                DraftRequest(
                    *each, 0 if certain or not each.output else min(each.proposal.wanted, PROPOSED_MAX)
                )
                for each, certain in zip(asked, forced, strict=True)
            ]
        )


def _output(sequence: Sequence, taken: RowResult) -> list[int]:
    if not isinstance(taken, tuple) or not taken:
        return []
    output = [*sequence.output]
    for token in taken:
        output.append(token.id)
        if sequence.request.finish_reason(output) is not None:
            return []
    return output


def _forced(asked: _Proposed) -> list[int]:
    if asked.sequence.fold is None or not asked.output:
        return []
    try:
        return asked.sequence.fold.forced(asked.output, PROPOSED_MAX)
    except GrammarLost:
        return []  # the next draw says why
