"""Draft tokens for the next step of a sequence: forced by its grammar, or drafted by a smaller model.

A grammar sometimes allows one token only, for example inside the property names of a schema. That token is
sampled whatever the logits are, so it is proposed as forced. Elsewhere a draft model may guess. Both are
known on the rank that samples, which has the grammar states and the draft model. The engine sends the
proposals to the other ranks, so that all ranks have the same drafts (`drafts-agreed`).
"""

from collections import abc
from typing import NamedTuple

from baton.engine_interface import PROPOSED_MAX, Proposal, Row, RowResult, Sequence
from baton.grammars.grammar_state import GrammarLost
from baton.sampling.draft_model import DraftModel, DraftRequest, DraftTimes


class ProposalRequest(NamedTuple):
    """Request for the next draft tokens of a sequence, after a step that sampled tokens for it."""

    sequence: Sequence
    proposal: Proposal
    output: list[int]
    """All output token ids of the sequence, including those that the step has just sampled.

    Empty if nothing was sampled or the answer has ended.
    """


class ProposedTokens(NamedTuple):
    """The draft tokens that are proposed for one sequence."""

    tokens: list[int]
    """Draft token ids for the sequence's next positions, at most PROPOSED_MAX."""
    forced: int
    """Number of tokens at the beginning of `tokens` that the grammar forces."""


class Proposer:
    """Makes the draft tokens of each step, on the rank that samples."""

    def __init__(self, model: DraftModel | None = None) -> None:
        """Store the draft `model`, which drafts where no grammar forces a token. None if there is none."""
        self._model = model

    def propose(self, wanted: abc.Sequence[ProposalRequest]) -> tuple[list[ProposedTokens], DraftTimes]:
        """Return draft tokens for each request, and the time that the draft model took."""
        forced = [_forced(each) for each in wanted]
        drafted, times = self._drafted(wanted, forced)
        return [
            ProposedTokens(certain or guessed, len(certain))
            for certain, guessed in zip(forced, drafted, strict=True)
        ], times

    def _drafted(
        self, wanted: abc.Sequence[ProposalRequest], forced: abc.Sequence[list[int]]
    ) -> tuple[abc.Sequence[list[int]], DraftTimes]:
        """Return the draft model's tokens for each request, and the time it took.

        `forced`: tokens that grammars force, by request. A request with forced tokens gets no others.
        """
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
    """Return the requests for draft tokens of the sequences in `rows`. `taken`: result of each row in this
    step."""
    return [
        ProposalRequest(row.sequence, row.sequence.proposal, output_after(row.sequence, tokens))
        for row, tokens in zip(rows, taken, strict=True)
        if row.sample and row.sequence.proposal is not None
    ]


def output_after(sequence: Sequence, taken: RowResult) -> list[int]:
    """Return the sequence's output with the tokens just sampled, `taken`.

    Returns an empty list if nothing was sampled or the answer ended.
    """
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
