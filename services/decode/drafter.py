"""What may come next in one sequence, and how did its drafts fare?"""

from services.engine.interface import Sequence
from services.rooms.drafting import Acceptance
from services.rooms.lookup import Lookup


class Drafter:
    """Reads its sequence in pieces, since a prompt may be long."""

    def __init__(self, sequence: Sequence, longest: int) -> None:
        """`longest`: tokens of an earlier occurrence that are compared."""
        self.acceptance = Acceptance()
        self._sequence = sequence
        self._lookup = Lookup(len(sequence.request.prompt) + sequence.request.max_tokens, longest)

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

    def draft(self, most: int) -> list[int]:
        """Of a sequence that was read: what may come next, up to `most` tokens of it and up to the last that
        the request allows."""
        request, output = self._sequence.request, self._sequence.output
        return self._lookup.draft(min(most, request.max_tokens - len(output) - 1))
