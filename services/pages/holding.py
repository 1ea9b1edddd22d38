"""Memory of one room on one rank: its page tables, its metadata slot, and what a peer may do with them."""

from dataclasses import dataclass, field
from enum import Enum

from baton.ids import PageCounts, PageId, PageTables
from baton.pages.prefix_tree import UNSALTED
from baton.pages.slots import Slot


class Standing(Enum):
    HELD = "held"
    EXPOSED = "exposed"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class Holding:
    """Memory of one room on this rank: its pages by KV group, and its metadata slot."""

    pages: PageTables
    """Page table of each KV group, in token order. Page i of a group holds the KV of tokens [i * page_tokens,
    (i + 1) * page_tokens)."""
    slot: Slot
    salt: int = UNSALTED
    """Cache salt of the room. Its tokens are looked up in the prefix cache, and added to it, under this
    salt."""
    shared_tokens: int = 0
    """Number of the room's leading tokens whose pages it shares through the prefix cache. These pages were
    cached when the room took them, or were added to the cache later."""
    shared: PageCounts = ()
    """Number of leading pages that are shared through the prefix cache, by KV group."""
    exposed: PageTables = ()
    """Own pages of this room that a peer may write to, by KV group. The room's pages after these are for
    output tokens."""
    standing: Standing = Standing.HELD
    restored: PageTables = ()
    """Pages of the cached state with which the room's computation begins, by KV group. () for none."""
    restored_behind: PageId | None = None
    """Block of the prefix tree whose state is `restored`."""
    stored: dict[int, PageTables] = field(default_factory=dict)
    """Own pages for the states behind leading tokens, by KV group, by the number of these tokens."""
    further: dict[int, PageTables] = field(default_factory=dict)
    """Own page tables of the request's choices after choice 0 (n > 1), by choice index. Their pages come
    after the prompt pages that the choice shares with choice 0."""

    @property
    def own(self) -> PageTables:
        """Page tables of the pages that the room does not share through the prefix cache, by KV group."""
        return tuple([table[shared:] for table, shared in zip(self.pages, self.shared, strict=True)])
