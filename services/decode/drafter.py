"""Draft tokens for one sequence, and statistics of how many are accepted."""

from collections import abc
from typing import Final

from baton.engine_interface import Proposal, Sequence
from baton.rooms.steps.draft_budget import DRAFTS_MAX, Acceptance, DraftSource
from baton.rooms.steps.ngram_lookup import NgramLookup

AT_ONCE: Final = 2 * DRAFTS_MAX
"""Most tokens of a sequence that are indexed just before a step. It suffices for the tokens that the last
step sampled, but not for a prompt."""


class Drafter:
    """Maker of draft tokens for one sequence, by n-gram lookup or from a draft model. It indexes the sequence
    in pieces, because a prompt may be long.

    Tokens that a grammar forces, and tokens of a draft model, come from the engine.
    """

    def __init__(self, sequence: Sequence, longest: int, ahead: int = 0) -> None:
        """Make a drafter. `longest`: length in tokens of the suffix that n-gram lookup compares. `ahead`:
        most tokens that a draft model makes instead, or 0 without a draft model."""
        self.acceptance = Acceptance()
        self.source = DraftSource.MODEL if ahead else DraftSource.NGRAM
        """Source of the last drafts: grammar, draft model or n-gram lookup."""
        self._sequence = sequence
        self._ahead = ahead
        tokens = len(sequence.request.prompt) + sequence.request.max_tokens
        self._lookup = None if ahead else NgramLookup(tokens, longest)
        if ahead or sequence.request.grammar is not None:
            sequence.proposal = Proposal()

    @property
    def proposal(self) -> Proposal | None:
        return self._sequence.proposal

    @property
    def unread(self) -> int:
        """Number of tokens of the sequence that are not indexed for n-gram lookup yet."""
        return 0 if self._lookup is None else self._sequence.length - len(self._lookup)

    def read(self, most: int) -> int:
        """Index at most `most` further tokens of the sequence for n-gram lookup. Return how many were
        indexed."""
        if self._lookup is None:
            return 0
        start = len(self._lookup)
        stop = min(self._sequence.length, start + most)
        self._lookup.enter(self._sequence.tokens(start, stop))
        return stop - start

    def drafts(self) -> abc.Sequence[int]:
        """Return at most DRAFTS_MAX draft tokens for the next step, as far as the request allows more output.

        They are the tokens that a grammar forces, or else those of the draft model or of the n-gram lookup.
        All but the tokens of the last step must be indexed.
        """
        if self.unread <= AT_ONCE:
            self.read(AT_ONCE)
        most, proposal = min(DRAFTS_MAX, self._left - 1), self.proposal
        if proposal is not None and proposal.forced:
            self.source = DraftSource.GRAMMAR
            return proposal.tokens[: min(proposal.forced, most)]
        if proposal is not None and self._ahead:
            self.source = DraftSource.MODEL
            return proposal.tokens[:most]
        self.source = DraftSource.NGRAM
        return () if self.unread else self.draft(most)

    def draft(self, most: int) -> list[int]:
        """Return at most `most` draft tokens by n-gram lookup: those that followed an earlier occurrence of
        the sequence's last tokens."""
        return [] if self._lookup is None else self._lookup.draft(most)

    @property
    def ahead(self) -> int:
        """Most tokens that the draft model may make for this sequence in the step after the next one."""
        return max(min(self._ahead, self._left - 2), 0)

    @property
    def _left(self) -> int:
        """Number of output tokens that the sequence may still have under the request's limit."""
        return self._sequence.request.max_tokens - len(self._sequence.output)

    def note(self, checked: int, taken: int) -> None:
        """Record how many of the last draft tokens a step verified (`checked`), and how many of those it
        accepted (`taken`).

        Forced tokens do not count: they are no evidence about other drafts.
        """
        if self.source is not DraftSource.GRAMMAR:
            self.acceptance.note(checked, taken)
