"""What may come next in one sequence, and how did its drafts fare?"""

from collections import abc
from typing import Final

from baton.engine_interface import Proposal, Sequence
from baton.rooms.draft_budget import DRAFTS_MAX, Acceptance, DraftSource
from baton.rooms.ngram_lookup import NgramLookup

AT_ONCE: Final = 2 * DRAFTS_MAX
"""Tokens of a sequence that are read before a step: those that the last one drew, and no prompt."""


class Drafter:
    """Reads its sequence in pieces, since a prompt may be long. The engine proposes what a grammar forces and
    what a draft model says."""

    def __init__(self, sequence: Sequence, longest: int, ahead: int = 0) -> None:
        """`longest`: tokens of an earlier occurrence that are compared. `ahead`: most tokens of a draft
        model, which is asked instead; 0: there is none."""
        self.acceptance = Acceptance()
        self.source = DraftSource.MODEL if ahead else DraftSource.NGRAM
        """Of what was drafted last."""
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
        """Tokens of the sequence."""
        return 0 if self._lookup is None else self._sequence.length - len(self._lookup)

    def read(self, most: int) -> int:
        """Read on, `most` tokens at most. How many it were."""
        if self._lookup is None:
            return 0
        start = len(self._lookup)
        stop = min(self._sequence.length, start + most)
        self._lookup.enter(self._sequence.tokens(start, stop))
        return stop - start

    def drafts(self) -> abc.Sequence[int]:
        """What may come next, DRAFTS_MAX tokens at most, and none beyond the last that the request allows:
        what is forced, or else what the draft model says or what repeats itself, once all but what the last
        step drew is read."""
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
        """Of a sequence that was read: what repeats itself, up to `most` tokens of it."""
        return [] if self._lookup is None else self._lookup.draft(most)

    @property
    def ahead(self) -> int:
        """Most tokens that the draft model may bring for the step behind the next one, which draws one."""
        return max(min(self._ahead, self._left - 2), 0)

    @property
    def _left(self) -> int:
        """Tokens that the request still allows."""
        return self._sequence.request.max_tokens - len(self._sequence.output)

    def note(self, checked: int, taken: int) -> None:
        """A step checked so many of what was drafted last, and took the first `taken`. How what is forced
        fared says nothing of other drafts."""
        if self.source is not DraftSource.GRAMMAR:
            self.acceptance.note(checked, taken)
