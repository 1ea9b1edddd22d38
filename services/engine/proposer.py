"""What may come next in each sequence of a step, so that the next step can check it?

Where a grammar leaves one token alone, that token is drawn whatever its logits are, and so is the next one,
as far as the grammar goes on so: the names of a schema's properties, mostly. The rank that draws knows that,
since it folds the outputs. It tells the others with the step.
"""

from collections import abc
from typing import Final

from services.engine.interface import PROPOSED_MAX, Proposal, Row, Sequence, Taken
from services.engine.team import Team
from services.grammars.fold import GrammarLost

_WORDS: Final = 2 + PROPOSED_MAX
"""Of a proposal: how many tokens, how many of them are forced, and the tokens."""


class Proposer:
    """Of one rank."""

    def __init__(self, team: Team, drawer: int) -> None:
        """`drawer`: the rank that draws."""
        self._team = team
        self._drawer = drawer

    def propose(self, rows: abc.Sequence[Row], taken: abc.Sequence[Taken]) -> None:
        """Make anew what the sequences of `rows` have for it, behind what was `taken` of each."""
        asked = [
            (row.sequence, row.sequence.proposal, tokens)
            for row, tokens in zip(rows, taken, strict=True)
            if row.sample and row.sequence.proposal is not None
        ]
        if not asked:
            return
        words: list[float] | None = None
        if self._team.rank == self._drawer:
            words = []
            for sequence, _, tokens in asked:
                forced = _forced(sequence, tokens)[:PROPOSED_MAX]
                words += [len(forced), len(forced), *forced, *[0.0] * (PROPOSED_MAX - len(forced))]
        told = self._team.tell(self._drawer, words, _WORDS * len(asked))
        for place, (_, proposal, _) in enumerate(asked):
            _read(proposal, told[_WORDS * place : _WORDS * (place + 1)])


def _read(proposal: Proposal, words: abc.Sequence[float]) -> None:
    count, proposal.forced = int(words[0]), int(words[1])
    proposal.tokens = tuple(map(int, words[2 : 2 + count]))


def _forced(sequence: Sequence, taken: Taken) -> list[int]:
    """None behind an answer's end, and where nothing was drawn."""
    if sequence.fold is None or not isinstance(taken, tuple) or not taken:
        return []
    output = [*sequence.output, *(token.id for token in taken)]
    if sequence.request.finish_reason(output) is not None:
        return []
    try:
        return sequence.fold.forced(output)
    except GrammarLost:
        return []  # the next draw says why
