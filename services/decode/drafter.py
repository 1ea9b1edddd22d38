"""What may come next in one sequence, and how did its drafts fare?"""

from collections import abc
from typing import Final

from services.engine.interface import Proposal, Sequence
from services.rooms.drafting import DRAFTS_MAX, Acceptance, DraftSource
from services.rooms.lookup import Lookup

AT_ONCE: Final = 2 * DRAFTS_MAX
"""Tokens of a sequence that are read before a step: those that the last one drew, and no prompt."""


class Drafter:
    """Reads its sequence in pieces, since a prompt may be long. The engine proposes what a grammar forces."""

    def __init__(self, sequence: Sequence, longest: int) -> None:
        """`longest`: tokens of an earlier occurrence that are compared."""
        self.acceptance = Acceptance()
        self.source = DraftSource.NGRAM
        """Of what was drafted last."""
        self._sequence = sequence
        self._lookup = Lookup(len(sequence.request.prompt) + sequence.request.max_tokens, longest)
        if sequence.request.grammar is not None:
            sequence.proposal = Proposal()

    @property
    def unread(self) -> int:
        """Tokens of the sequence."""
        return self._sequence.length - len(self._lookup)

    def read(self, most: int) -> int:
        """Read on, `most` tokens at most. How many it were."""
        start = len(self._lookup)
        stop = min(self._sequence.length, start + most)
        self._lookup.enter(self._sequence.tokens(start, stop))
        return stop - start

    def drafts(self) -> abc.Sequence[int]:
        """What may come next, DRAFTS_MAX tokens at most, and none beyond the last that the request allows:
        what is forced, or else what repeats itself, once all but what the last step drew is read."""
        if self.unread <= AT_ONCE:
            self.read(AT_ONCE)
        request, proposal = self._sequence.request, self._sequence.proposal
        most = min(DRAFTS_MAX, request.max_tokens - len(self._sequence.output) - 1)
        forced = () if proposal is None else proposal.tokens[: min(proposal.forced, most)]
        self.source = DraftSource.GRAMMAR if forced else DraftSource.NGRAM
        return forced if forced or self.unread else self.draft(most)

    def draft(self, most: int) -> list[int]:
        """Of a sequence that was read: what repeats itself, up to `most` tokens of it."""
        return self._lookup.draft(most)

    def note(self, checked: int, taken: int) -> None:
        """A step checked so many of what was drafted last, and took the first `taken`. How what is forced
        fared says nothing of other drafts."""
        if self.source is not DraftSource.GRAMMAR:
            self.acceptance.note(checked, taken)
