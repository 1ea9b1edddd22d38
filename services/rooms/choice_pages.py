"""Page counts of a room with several choices: the pages that all choices share, and the pages of each choice.

All choices read the whole blocks of their common beginning, and none writes there (`shared-is-read-only`). A
block is the fewest positions for which every KV group has whole pages. Each choice after the first computes
the last known token once more, since its draw needs the logits. So each choice has its own copy of the page
of that token, and of all pages after it (`choices-apart`). If the model has states, no choice can begin
with another one's, since a state cannot be taken back. Each choice then computes all tokens itself.
"""

from dataclasses import dataclass, field
from math import lcm

from baton.ids import PageCounts


@dataclass(slots=True)
class ChoicePages:
    """Page counts of one room with one or more choices, computed once from numbers that all ranks share."""

    known_tokens: int
    """Number of tokens that every choice begins with (the prompt and earlier output), at least 1."""
    tokens_max: int
    """Most tokens of one choice whose KV is stored, at least `known_tokens`."""
    choices: int
    page_tokens: tuple[int, ...]
    """Number of tokens that a page serves, by KV group."""
    states: tuple[int, ...] = ()
    """Indices of the KV groups of states, of which a choice has one page for its whole length."""
    shared_tokens: int = field(init=False)
    """Number of leading tokens whose pages all choices of the room share."""
    shared: PageCounts = field(init=False)
    """Number of pages that all choices of the room share, by KV group."""
    needed: PageCounts = field(init=False)
    """Number of pages that all choices of a room take together at their full length, by KV group."""
    first: PageCounts = field(init=False)
    """Number of pages that decode grants when the room begins, by KV group. They suffice for the known tokens
    and one more block (`memory-as-used`)."""
    block: PageCounts = field(init=False)
    """Number of pages that one output sequence (choice) takes at a time as it grows, by KV group. A step
    needs at most this many for it."""

    def __post_init__(self) -> None:
        block = lcm(*(size for group, size in enumerate(self.page_tokens) if group not in self.states))
        self.shared_tokens = 0 if self.states else (self.known_tokens - 1) // block * block
        self.shared = tuple([self.shared_tokens // size for size in self.page_tokens])
        further = self.choices - 1
        counts = zip(self.each, self.shared, strict=True)
        self.needed = tuple([each + further * (each - shared) for each, shared in counts])
        self.first = self.pages_for(min(self.known_tokens + block, self.tokens_max))
        growth = enumerate(self.pages_for(block))
        self.block = tuple([0 if group in self.states else count for group, count in growth])

    @property
    def each(self) -> PageCounts:
        """Number of pages of one choice at its full length, by KV group. Pages that it shares with other
        choices are included."""
        return self.pages_for(self.tokens_max)

    @property
    def begun(self) -> list[int]:
        """Number of leading positions for which each choice has pages when the room is granted, by choice
        index."""
        return [self.positions(self.first), *[self.shared_tokens] * (self.choices - 1)]

    def positions(self, pages: PageCounts) -> int:
        """Return how many leading positions of a choice have space in `pages` pages. `pages`: number of
        pages, by KV group."""
        return min([count * size for count, size in zip(pages, self.page_tokens, strict=True)])

    def pages_for(self, tokens: int) -> PageCounts:
        """Return how many pages `tokens` tokens of one choice take, by KV group."""
        return tuple([-(-tokens // size) for size in self.page_tokens])


def positions_of(known_tokens: int, tokens_max: int, choices: int, block_tokens: int) -> int:
    """Return the KV positions that all choices of a room take together at full length, in whole blocks."""
    (blocks,) = ChoicePages(known_tokens, tokens_max, choices, (block_tokens,)).needed
    return blocks * block_tokens


def longest_of(known_tokens: int, choices: int, tokens: int, block_tokens: int) -> int:
    """Return how many KV positions each of `choices` can have in a cache of `tokens` positions. Fewer than
    `known_tokens` if the known tokens do not fit."""
    shared = (known_tokens - 1) // block_tokens
    blocks = tokens // block_tokens + (choices - 1) * shared
    return blocks // choices * block_tokens
