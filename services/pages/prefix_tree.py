"""Which pages hold the beginning of a sequence already, who reads them, and which is given up first?

A radix tree whose edges are blocks of token ids, the fewest that fill whole pages of every group. A block is
found by the tokens it holds *and* by the block before it, so that what it was computed from is known with it.
It has pages of each group, and the first of them names it. It enters when nothing will be written to them any
more and stays until their space is needed (`shared-is-read-only`).

Each salt has a root of its own: no way leads from one to what hangs on another (`same-root-only`).

A room pins every block from the root to the last one it uses. So a block is used as often, at least, as what
lies below it, and it becomes idle no earlier: in the order in which blocks became idle, leaves come first,
and the oldest can always be given up without losing the way to another.

Deterministic: no clock and no order but that of the calls. Ranks that make the same calls hold the same tree,
page for page, and `digest` tells them when they do not.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import lcm
from typing import Final, NamedTuple

from baton.ids import PageCounts, PageId, PageTables
from baton.pages.errors import IllegalPageMove, OutOfPages
from baton.pages.kv_checksum import mix

UNSALTED: Final = 0

BlockKey = tuple[int, tuple[int, ...]]
"""(the block before, or a root, the tokens in the block)"""


class Entered(NamedTuple):
    """What became of a room's blocks."""

    way: tuple[PageId, ...]
    """All that the room uses now, from the root on."""
    fresh: tuple[PageId, ...]
    """Its own that entered: nobody else uses them yet."""
    woken: tuple[PageId, ...]
    """Those of others that were idle."""
    spared: PageTables
    """Its own pages that it does not need any more, () if it needs all: it uses another's."""


@dataclass(slots=True)
class _Known:
    way: BlockKey
    pages: PageTables
    sign: int
    """What it adds to the digest."""
    users: int = 0


class PrefixTree:
    """Blocks by what they hold. Bounded by the pools whose pages it names."""

    def __init__(self, page_tokens: Sequence[int]) -> None:
        """`page_tokens`: of a page of each group; 0 of each to know nothing, ever."""
        self.block_tokens = lcm(*page_tokens)
        self._each = tuple(self.block_tokens // size if size else 0 for size in page_tokens)
        """Pages of a block, by group."""
        self._no_counts: PageCounts = (0,) * len(self._each)
        self._no_pages: PageTables = ((),) * len(self._each)
        self._blocks: dict[PageId, _Known] = {}
        self._below: dict[BlockKey, PageId] = {}
        self._idle: OrderedDict[PageId, None] = OrderedDict()
        """Without users, the one to be given up next first."""
        self.digest = 0
        """Of which pages are known by what: ranks whose trees differ differ here, but for chance."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: PageId) -> bool:
        return block in self._blocks

    @property
    def evictable(self) -> int:
        return len(self._idle)

    def users(self, block: PageId) -> int:
        """How many rooms use a block of the tree."""
        return self._blocks[block].users

    def alone(self, pages: PageTables, pinned: int) -> int:
        """How many of a room's leading blocks, all of which it has pinned, no other room uses: the last ones,
        since a block is used as often, at least, as what lies below it."""
        table, each = pages[0], self._each[0]
        shared = bisect_left(range(pinned), True, key=lambda place: self.users(table[place * each]) == 1)
        return pinned - shared

    def pages(self, blocks: Sequence[PageId]) -> PageTables:
        """Those that blocks of the tree have."""
        return self._joined([self._blocks[block].pages for block in blocks])

    def counts(self, blocks: int) -> PageCounts:
        """Pages that so many blocks have."""
        if blocks == 0:
            return self._no_counts
        return tuple([blocks * each for each in self._each])

    def blocks(self, pages: PageCounts) -> int:
        """Most blocks whose pages are no more than `pages`."""
        return min([count // each if each else 0 for count, each in zip(pages, self._each, strict=True)])

    def blocks_for(self, pages: Sequence[int]) -> int:
        """Fewest blocks that have as many pages as that."""
        needed = [-(-count // each) if each else 0 for count, each in zip(pages, self._each, strict=True)]
        return max(needed)

    def match(self, tokens: Sequence[int], salt: int = UNSALTED) -> tuple[PageId, ...]:
        """The blocks that hold the longest beginning of `tokens`, from position 0 on, that is known under
        `salt`."""
        found: list[PageId] = []
        before: int = _root(salt)
        for key in self._keys(tokens):
            block = self._below.get((before, key))
            if block is None:
                break
            found.append(block)
            before = block
        return tuple(found)

    def idle(self, blocks: Sequence[PageId]) -> int:
        """How many of `blocks` nobody uses."""
        return sum(block in self._idle for block in blocks)

    def pin(self, blocks: Sequence[PageId]) -> tuple[PageId, ...]:
        """One more room uses these, a whole way from the root on. Returns those that were idle."""
        woken: list[PageId] = []
        for block in blocks:
            if block in self._idle:
                del self._idle[block]
                woken.append(block)
            self._blocks[block].users += 1
        return tuple(woken)

    def unpin(self, blocks: Sequence[PageId]) -> tuple[PageId, ...]:
        """One room less uses these, as they were pinned. Returns those that are idle now."""
        ended: list[PageId] = []
        for block in reversed(blocks):
            known = self._blocks[block]
            if known.users == 0:
                raise IllegalPageMove(f"page {block}: unpinned more often than pinned")
            known.users -= 1
            if known.users == 0:
                self._idle[block] = None
                ended.append(block)
        return tuple(ended)

    def way(self, pages: PageTables, blocks: int) -> tuple[PageId, ...]:
        """The names of the leading `blocks` blocks of a room's `pages`."""
        return pages[0][: blocks * self._each[0] : self._each[0]] if blocks else ()

    def enter(self, tokens: Sequence[int], pages: PageTables, pinned: int, salt: int = UNSALTED) -> Entered:
        """A room's `pages` hold `tokens`, and are not written to any more: know them by it, the whole blocks.

        `pinned`: how many of these, the leading ones, it has pinned, by what is known under `salt`. Of what
        another room entered meanwhile that one's block stays, and is pinned: the room need not keep its own.
        """
        way = list(self.way(pages, pinned))
        entered: list[PageId] = []
        spared: list[PageTables] = []
        before: int = way[-1] if way else _root(salt)
        for key, own in zip(self._keys(tokens, pinned), self._cut(pages, pinned), strict=False):
            step = before, key
            block = self._below.get(step)
            if block is None:
                block = own[0][0]
                if block in self._blocks:
                    raise IllegalPageMove(f"page {block} is known by other tokens")
                known = self._blocks[block] = _Known(step, own, _sign(own, step))
                self._below[step] = block
                self.digest ^= known.sign
                entered.append(block)
            else:
                spared.append(own)
            way.append(block)
            before = block
        woken = self.pin(way[pinned:])
        return Entered(tuple(way), tuple(entered), woken, self._joined(spared) if spared else ())

    def evict(self, count: int) -> PageTables:
        """Forget `count` blocks that nobody uses, the longest idle first, and return their pages. Raises
        OutOfPages."""
        if count > len(self._idle):
            raise OutOfPages(f"{count} cached pages to give up, {len(self._idle)} are not in use")
        given_up = [self._blocks.pop(self._idle.popitem(last=False)[0]) for _ in range(count)]
        for known in given_up:
            self._unlink(known)
        return self._joined([known.pages for known in given_up])

    def distrust(self, block: PageId) -> None:
        """It does not hold what it should, or a block below it does not: from now on neither is found, and
        their space is given up in its turn."""
        self._unlink(self._blocks[block])

    def _unlink(self, known: _Known) -> None:
        """It is not found any more, if it was: another block may be, by the same tokens."""
        if self._below.get(known.way) == known.pages[0][0]:
            del self._below[known.way]
            self.digest ^= known.sign

    def _keys(self, tokens: Sequence[int], known: int = 0) -> Iterator[tuple[int, ...]]:
        """The tokens of each whole block but the first `known`."""
        size = self.block_tokens
        if size == 0:
            return
        for start in range(known * size, len(tokens) - size + 1, size):
            yield tuple(tokens[start : start + size])

    def _cut(self, pages: PageTables, known: int) -> Iterable[PageTables]:
        """The pages of each whole block but the first `known`: the way back from `_joined`."""
        tables = zip(pages, self._each, strict=True)
        cut = [zip(*[iter(table[known * each :])] * each, strict=False) for table, each in tables]
        return zip(*cut, strict=False)

    def _joined(self, blocks: Sequence[PageTables]) -> PageTables:
        """The pages of several blocks, one after the other."""
        if not blocks:
            return self._no_pages
        return tuple([tuple(chain.from_iterable(of_group)) for of_group in zip(*blocks, strict=True)])


def _root(salt: int) -> int:
    """No page's number: those are 0 and more."""
    return -1 - salt


def _sign(pages: PageTables, way: BlockKey) -> int:
    return mix(hash((pages, way)))
