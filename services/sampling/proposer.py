"""Proposals for the next tokens of sequences: forced by a grammar, or drafted by a smaller model.

A grammar sometimes allows one token only, for example inside the property names of a schema. That token is
drawn whatever the logits are, so it is proposed as forced. Elsewhere a draft model may guess. Both are known
on the rank that draws, which has the grammar states and the draft model. The engine sends proposals to the
other ranks with the step, so that all ranks draft the same tokens (`drafts-agreed`).
"""

from collections import abc
from typing import NamedTuple

from baton.engine_interface import PROPOSED_MAX, Proposal, Row, RowResult, Sequence
from baton.grammars.grammar_state import GrammarLost
from baton.sampling.draft_model import DraftModel, DraftRequest, DraftTimes


class ProposalRequest(NamedTuple):
    """A sequence that wants a proposal after a step."""

    sequence: Sequence
    proposal: Proposal
    output: list[int]
    """All output tokens, those of the step included. Empty if the answer ended or nothing was drawn."""


class ProposedTokens(NamedTuple):
    """The proposal for one sequence."""

    tokens: list[int]
    """At most PROPOSED_MAX token ids."""
    forced: int
    """Number of leading tokens that the grammar forces."""


class Proposer:
    """Makes proposals on the rank that draws."""

    def __init__(self, model: DraftModel | None = None) -> None:
        """`model`: drafts where no grammar forces a token."""
        self._model = model

    def propose(self, wanted: abc.Sequence[ProposalRequest]) -> tuple[list[ProposedTokens], DraftTimes]:
        """Return a proposal for each request, and the time that the draft model took."""
        forced = [_forced(each) for each in wanted]
        drafted, times = self._drafted(wanted, forced)
        return [
            ProposedTokens(certain or guessed, len(certain))
            for certain, guessed in zip(forced, drafted, strict=True)
        ], times

    def _drafted(
        self, wanted: abc.Sequence[ProposalRequest], forced: abc.Sequence[list[int]]
    ) -> tuple[abc.Sequence[list[int]], DraftTimes]:
        """Draft for the sequences without a forced token."""
        if self._model is None or not any(each.proposal.wanted for each in wanted):
            return [[]] * len(wanted), DraftTimes()
        return self._model.propose(
            [
                DraftRequest(
                    *each, 0 if certain or not each.output else min(each.proposal.wanted, PROPOSED_MAX)
                )
                for each, certain in zip(wanted, forced, strict=True)
            ]
        )


def proposal_requests(rows: abc.Sequence[Row], taken: abc.Sequence[RowResult]) -> list[ProposalRequest]:
    """Return the sequences of `rows` that want a proposal. `taken`: result of each row in this step."""
    return [
        ProposalRequest(row.sequence, row.sequence.proposal, output_after(row.sequence, tokens))
        for row, tokens in zip(rows, taken, strict=True)
        if row.sample and row.sequence.proposal is not None
    ]


def output_after(sequence: Sequence, taken: RowResult) -> list[int]:
    """Return the sequence's output with the tokens just drawn. Empty if nothing was drawn or it ended."""
    if not isinstance(taken, tuple) or not taken:
        return []
    output = [*sequence.output]
    for token in taken:
        output.append(token.id)
        if sequence.request.finish_reason(output) is not None:
            return []
    return output


def _forced(request: ProposalRequest) -> list[int]:
    if request.sequence.fold is None or not request.output:
        return []
    try:
        return request.sequence.fold.forced(request.output, PROPOSED_MAX)
    except GrammarLost:
        return []  # the next draw reports the reason
