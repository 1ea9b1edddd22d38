"""Prefix cache: a radix tree of the pages that hold the KV of token prefixes.

The edges of the tree are blocks of token ids. A block is the smallest number of tokens that fills whole pages
of every KV group. It has pages of each group, and the number of its first page is its id. It is found by its
tokens and by the block before it, so all tokens that its KV depends on are known, too. A block enters when no
write to its pages can follow. It stays until its space is needed (`shared-is-read-only`). Each cache salt has
its own root, and no path leads from one root to blocks of another (`same-root-only`).

A room pins every block from the root to the last one that it uses. So a block has at least as many users as
its children, and becomes idle no earlier than they do. Blocks are evicted in the order in which they became
idle. So leaves come first, and no eviction cuts the path to another block.

In a model with states, a block may also have the state behind its last token, in one page of each group of
states. A computation can begin behind such a block only (`state-at-its-end`). States are evicted by
themselves, in the order in which they became unused, and with their blocks.

The tree is deterministic: it has no clock, and its order follows from the calls alone. Ranks that make the
same calls have the same tree, page for page. Ranks compare `digest` to find differences.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from math import lcm
from typing import Final, NamedTuple, Protocol

from baton.ids import PageCounts, PageId, PageTables
from baton.pages.errors import IllegalPageMove, OutOfPages
from baton.pages.kv_checksum import mix

UNSALTED: Final = 0

BlockKey = tuple[int, tuple[int, ...]]
"""Key of a block in the prefix tree: id of its parent block or root, and its token ids."""


class Entered(NamedTuple):
    """Result of adding a room's blocks to the prefix tree: the blocks in use, and what changed."""

    way: tuple[PageId, ...]
    """Ids of all blocks of the tree that the room now uses, in token order from the root on."""
    fresh: tuple[PageId, ...]
    """Ids of the blocks that were added to the tree from the room's own pages. No other room uses them
    yet."""
    woken: tuple[PageId, ...]
    """Ids of the blocks of other rooms that the room now uses and that no room used before."""
    spared: PageTables
    """Pages of the room that it no longer needs, by KV group, because another room has added an equal block.
    () if there are none."""
    states: tuple[PageTables, ...] = ()
    """Pages of each state that was added to the tree, by KV group. No room uses them yet."""


@dataclass(slots=True)
class _Known:
    way: BlockKey
    pages: PageTables
    sign: int
    """Number by which this block contributes to the digest of the tree."""
    users: int = 0
    states: PageTables = ()
    """Pages of the state behind the block's last token, by KV group. () if it has none."""
    state_users: int = 0


class TreeListener(Protocol):
    """Object that is told of each block that lookups find from now on, or no longer."""

    def stored(self, parent: int, block: PageId, tokens: Sequence[int], start: int) -> None:
        """Take note of a new block. `parent`: id of its parent, or of its root: -1 - salt. `tokens`: sequence
        in which the block begins at index `start`."""

    def hidden(self, block: PageId) -> None:
        """Take note that lookups find a block no longer, nor any block below it."""


class PrefixTree:
    """Prefix cache of one rank: blocks of pages, found by their tokens. Its size is bounded by the page
    pools."""

    def __init__(self, page_tokens: Sequence[int]) -> None:
        """Make an empty tree. `page_tokens`: tokens per page, by KV group. 0 for a group of states, and for
        every group to disable the cache."""
        grow = [size for size in page_tokens if size]
        self.block_tokens = lcm(*grow) if grow else 0
        self._of_states = tuple([int(bool(grow) and not size) for size in page_tokens])
        """Number of pages of one state, by KV group."""
        self.has_states = any(self._of_states)
        self._each = tuple(self.block_tokens // size if size else 0 for size in page_tokens)
        """Number of pages per block, by KV group."""
        self._no_counts: PageCounts = (0,) * len(self._each)
        self._no_pages: PageTables = ((),) * len(self._each)
        self._blocks: dict[PageId, _Known] = {}
        self._below: dict[BlockKey, PageId] = {}
        self._idle: OrderedDict[PageId, None] = OrderedDict()
        """Ids of the blocks that no room uses, in the order in which they will be evicted."""
        self._idle_states: OrderedDict[PageId, None] = OrderedDict()
        """Ids of the blocks with a state that no room uses, in the order in which the states will be
        evicted."""
        self.listener: TreeListener | None = None
        self.digest = 0
        """Digest of all cached pages and their tokens. Ranks with different trees have different digests,
        except by chance."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: PageId) -> bool:
        return block in self._blocks

    @property
    def evictable(self) -> int:
        return len(self._idle)

    @property
    def evictable_states(self) -> int:
        return len(self._idle_states)

    def users(self, block: PageId) -> int:
        """Return how many rooms use a block of the tree. `block`: id of the block."""
        return self._blocks[block].users

    def alone(self, pages: PageTables, pinned: int) -> int:
        """Return how many of a room's pinned blocks are used by no other room.

        These are its last ones, because a block has at least as many users as its children. `pages`: page
        tables of the room. `pinned`: number of its leading blocks that it has pinned.
        """
        table, each = pages[0], self._each[0]
        shared = bisect_left(range(pinned), True, key=lambda place: self.users(table[place * each]) == 1)
        return pinned - shared

    def pages(self, blocks: Sequence[PageId]) -> PageTables:
        """Return the pages of these blocks, by KV group. `blocks`: ids of blocks of the tree."""
        return self._joined([self._blocks[block].pages for block in blocks])

    def counts(self, blocks: int) -> PageCounts:
        """Return the number of pages that `blocks` blocks have, by KV group."""
        if blocks == 0:
            return self._no_counts
        return tuple([blocks * each for each in self._each])

    def blocks(self, pages: PageCounts) -> int:
        """Return the largest number of blocks that `pages` pages suffice for. `pages`: number of pages, by KV
        group."""
        return min([count // each for count, each in zip(pages, self._each, strict=True) if each], default=0)

    def blocks_for(self, pages: Sequence[int]) -> int:
        """Return the smallest number of blocks that have at least `pages` pages. `pages`: number of pages, by
        KV group."""
        needed = [-(-count // each) if each else 0 for count, each in zip(pages, self._each, strict=True)]
        return max(needed)

    def match(self, tokens: Sequence[int], salt: int = UNSALTED) -> tuple[PageId, ...]:
        """Return the ids of the blocks of the longest prefix of `tokens` that is cached under `salt`."""
        found: list[PageId] = []
        before: int = _root(salt)
        for key in self._keys(tokens):
            block = self._below.get((before, key))
            if block is None:
                break
            found.append(block)
            before = block
        return tuple(found)

    def state_counts(self, states: int) -> PageCounts:
        """Return the number of pages that `states` states have, by KV group."""
        return tuple([states * each for each in self._of_states])

    def with_state(self, way: Sequence[PageId]) -> int:
        """Return how many leading blocks of `way` there are up to the last one with a state."""
        return next((end for end in range(len(way), 0, -1) if self._blocks[way[end - 1]].states), 0)

    def pin_state(self, block: PageId) -> tuple[PageTables, bool]:
        """Count one more user of a block's state, so that it is not evicted. Return its pages by KV group,
        and whether no room used it before."""
        known = self._blocks[block]
        known.state_users += 1
        self._idle_states.pop(block, None)
        return known.states, known.state_users == 1

    def unpin_state(self, block: PageId) -> PageTables:
        """Remove one user of a block's state. Return its pages by KV group, or () if others use it."""
        known = self._blocks[block]
        if known.state_users == 0:
            raise IllegalPageMove(f"the state of block {block}: unpinned more often than pinned")
        known.state_users -= 1
        if known.state_users:
            return ()
        self._idle_states[block] = None
        return known.states

    def state_users(self, block: PageId) -> int:
        """Return how many rooms use the state behind a block of the tree."""
        return self._blocks[block].state_users

    def idle(self, blocks: Sequence[PageId]) -> int:
        """Return how many of these blocks no room uses. `blocks`: ids of blocks of the tree."""
        return sum(block in self._idle for block in blocks)

    def pin(self, blocks: Sequence[PageId]) -> tuple[PageId, ...]:
        """Count one more user of each of these blocks, so that they are not evicted. Return the ids of those
        that no room used before.

        `blocks`: ids of all blocks on a path, from the root to its last block.
        """
        woken: list[PageId] = []
        for block in blocks:
            if block in self._idle:
                del self._idle[block]
                woken.append(block)
            self._blocks[block].users += 1
        return tuple(woken)

    def unpin(self, blocks: Sequence[PageId]) -> tuple[PageId, ...]:
        """Remove one user from each of these blocks. Return the ids of the blocks that no room uses any
        more."""
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
        """Return the ids of a room's first `blocks` blocks in the prefix tree, in token order. `pages`: page
        tables of the room."""
        return pages[0][: blocks * self._each[0] : self._each[0]] if blocks else ()

    def enter(
        self,
        tokens: Sequence[int],
        pages: PageTables,
        pinned: int,
        salt: int = UNSALTED,
        states: Mapping[int, PageTables] | None = None,
    ) -> Entered:
        """Add the whole blocks of a room's pages to the tree, and pin them for the room.

        `tokens`: token ids whose KV is in `pages`. `pages`: page tables of the room, which are not written
        any more. `pinned`: number of leading blocks that the room has already pinned under `salt`. If another
        room has added an equal block meanwhile, that block is pinned, and the room no longer needs its own.
        `states`: pages of states of the room, by the number of blocks before them.
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
                if self.listener is not None:
                    self.listener.stored(before, block, tokens, len(way) * self.block_tokens)
            else:
                spared.append(own)
            way.append(block)
            before = block
        woken = self.pin(way[pinned:])
        added = self._add_states(way, states) if states else ()
        return Entered(tuple(way), tuple(entered), woken, self._joined(spared) if spared else (), added)

    def _add_states(self, way: Sequence[PageId], states: Mapping[int, PageTables]) -> tuple[PageTables, ...]:
        """Give blocks of `way` the states that they lack. Return the pages of these states."""
        added: list[PageTables] = []
        for end, pages in sorted(states.items()):
            known = self._blocks[way[end - 1]] if end <= len(way) else None
            if known is not None and not known.states:
                known.states = pages
                self._idle_states[way[end - 1]] = None
                added.append(pages)
        return tuple(added)

    def evict(self, count: int) -> PageTables:
        """Remove the `count` blocks that have been unused for longest. Return their pages, by KV group.
        Raises OutOfPages if fewer blocks are unused."""
        if count > len(self._idle):
            raise OutOfPages(f"{count} cached pages to give up, {len(self._idle)} are not in use")
        given_up = [self._blocks.pop(self._idle.popitem(last=False)[0]) for _ in range(count)]
        for known in given_up:
            self._unlink(known)
            self._idle_states.pop(known.pages[0][0], None)
        states = [known.states for known in given_up if known.states]
        return self._joined([*[known.pages for known in given_up], *states])

    def evict_states(self, count: int) -> PageTables:
        """Remove the `count` states that have been unused for longest. Return their pages, by KV group.
        Raises OutOfPages if fewer are unused."""
        if count > len(self._idle_states):
            raise OutOfPages(f"{count} states to give up, {len(self._idle_states)} are not in use")
        blocks = [self._blocks[self._idle_states.popitem(last=False)[0]] for _ in range(count)]
        given_up = [block.states for block in blocks]
        for block in blocks:
            block.states = ()
        return self._joined(given_up)

    def distrust(self, block: PageId) -> None:
        """Hide a block and its children from lookups, because its contents may be wrong. Their pages are
        freed when their turn to be evicted comes."""
        self._unlink(self._blocks[block])

    def _unlink(self, known: _Known) -> None:
        """Remove a block from lookups. Another block may then take its key."""
        if self._below.get(known.way) == known.pages[0][0]:
            del self._below[known.way]
            self.digest ^= known.sign
            if self.listener is not None:
                self.listener.hidden(known.pages[0][0])

    def _keys(self, tokens: Sequence[int], known: int = 0) -> Iterator[tuple[int, ...]]:
        """Yield the token ids of each whole block of a sequence, without its first `known` blocks."""
        size = self.block_tokens
        if size == 0:
            return
        for start in range(known * size, len(tokens) - size + 1, size):
            yield tuple(tokens[start : start + size])

    def _cut(self, pages: PageTables, known: int) -> Iterable[PageTables]:
        """Divide a room's page tables into blocks. Yield the pages of each whole block, by KV group, without
        the first `known` blocks. Inverse of `_joined`."""
        tables = zip(pages, self._each, strict=True)
        cut: list[Iterable[tuple[PageId, ...]]] = [
            zip(*[iter(table[known * each :])] * each, strict=False) if each else repeat(())
            for table, each in tables
        ]
        return zip(*cut, strict=False)

    def _joined(self, blocks: Sequence[PageTables]) -> PageTables:
        """Join the pages of several blocks into one page table for each KV group. Return the tables."""
        if not blocks:
            return self._no_pages
        return tuple([tuple(chain.from_iterable(of_group)) for of_group in zip(*blocks, strict=True)])


def _root(salt: int) -> int:
    """Return the id of the root for a cache salt: a negative number, because pages are numbered from 0."""
    return -1 - salt


def _sign(pages: PageTables, way: BlockKey) -> int:
    return mix(hash((pages, way)))
