"""Which pages does each of a room's choices read, which are its own, and how many is that?

All choices read the whole blocks of what they begin with, and none writes there (`shared-is-read-only`): a
block is the fewest positions of which every group of the layout has whole pages. The last token that is known
has to be computed once more by each further choice, since its draw needs the logits: the pages that this one
is in, and all behind it, are each choice's own (`choices-apart`).
"""

from dataclasses import dataclass, field
from math import lcm

from baton.ids import PageCounts


@dataclass(slots=True)
class ChoicePages:
    """Of one room, by numbers that all ranks share. What follows from them is computed once."""

    known_tokens: int
    """That every choice begins with, at least 1."""
    tokens_max: int
    """Most tokens of one choice whose KV is kept, at least `known_tokens`."""
    choices: int
    page_tokens: tuple[int, ...]
    """Of each group."""
    shared_tokens: int = field(init=False)
    """Leading tokens whose pages all choices read."""
    shared: PageCounts = field(init=False)
    """Those pages."""
    needed: PageCounts = field(init=False)
    """Of all choices together, once each is as long as it may get."""
    first: PageCounts = field(init=False)
    """What a grant takes: those of what is known, and of a block more (`memory-as-used`)."""
    block: PageCounts = field(init=False)
    """Pages of one block: no row of a step takes more of its own."""

    def __post_init__(self) -> None:
        block = lcm(*self.page_tokens)
        self.shared_tokens = (self.known_tokens - 1) // block * block
        self.shared = tuple([self.shared_tokens // size for size in self.page_tokens])
        further = self.choices - 1
        counts = zip(self.each, self.shared, strict=True)
        self.needed = tuple([each + further * (each - shared) for each, shared in counts])
        self.first = self.pages_for(min(self.known_tokens + block, self.tokens_max))
        self.block = self.pages_for(block)

    @property
    def each(self) -> PageCounts:
        """Pages of one choice, the shared ones included."""
        return self.pages_for(self.tokens_max)

    @property
    def begun(self) -> list[int]:
        """Of each choice: leading positions that pages are there for once the room was granted."""
        return [self.positions(self.first), *[self.shared_tokens] * (self.choices - 1)]

    def positions(self, pages: PageCounts) -> int:
        """Leading positions that so many pages of each group are there for."""
        return min([count * size for count, size in zip(pages, self.page_tokens, strict=True)])

    def pages_for(self, tokens: int) -> PageCounts:
        """Of one choice, for so many tokens."""
        return tuple([-(-tokens // size) for size in self.page_tokens])


def positions_of(known_tokens: int, tokens_max: int, choices: int, block_tokens: int) -> int:
    """Positions of a cache that the choices of a room take, in whole blocks."""
    (blocks,) = ChoicePages(known_tokens, tokens_max, choices, (block_tokens,)).needed
    return blocks * block_tokens


def longest_of(known_tokens: int, choices: int, tokens: int, block_tokens: int) -> int:
    """Most positions of each of `choices` in a cache of `tokens` positions; fewer than `known_tokens` where
    it does not hold them."""
    shared = (known_tokens - 1) // block_tokens
    blocks = tokens // block_tokens + (choices - 1) * shared
    return blocks // choices * block_tokens
