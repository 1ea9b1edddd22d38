"""Which pages does each of a room's choices read, which are its own, and how many is that?

All choices read the whole pages of what they begin with, and none writes there (`shared-is-read-only`). The
last token that is known has to be computed once more by each further choice, since its draw needs the logits:
the page that this one is in, and all behind it, are each choice's own (`choices-apart`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.ids import PageId


@dataclass(frozen=True, slots=True)
class ChoicePages:
    """Of one room, by numbers that all ranks share."""

    known_tokens: int
    """That every choice begins with, at least 1."""
    tokens_max: int
    """Most tokens of one choice whose KV is kept, at least `known_tokens`."""
    choices: int
    page_tokens: int

    @property
    def shared(self) -> int:
        """Leading pages that all choices read."""
        return _shared(self.known_tokens, self.page_tokens)

    @property
    def shared_tokens(self) -> int:
        return self.shared * self.page_tokens

    @property
    def each(self) -> int:
        """Pages of one choice, the shared ones included."""
        return -(-self.tokens_max // self.page_tokens)

    @property
    def needed(self) -> int:
        """Of all choices together."""
        return self.each + (self.choices - 1) * (self.each - self.shared)

    def table(self, pages: Sequence[PageId], choice: int) -> tuple[PageId, ...]:
        """The page table of a choice, from 0 on, of the room's `pages`: those of choice 0 come first, in the
        order of its tokens, and then each other's own."""
        if choice == 0:
            return tuple(pages[: self.each])
        own = self.each - self.shared
        begin = self.each + (choice - 1) * own
        return (*pages[: self.shared], *pages[begin : begin + own])


def longest_of(known_tokens: int, choices: int, tokens: int, page_tokens: int) -> int:
    """Most positions of each of `choices` in a cache of `tokens` positions; fewer than `known_tokens` where
    it does not hold them."""
    pages = tokens // page_tokens + (choices - 1) * _shared(known_tokens, page_tokens)
    return pages // choices * page_tokens


def _shared(known_tokens: int, page_tokens: int) -> int:
    return (known_tokens - 1) // page_tokens
