"""Log of the changes of a worker's prefix tree, which routers follow to know what is cached there.

An event says that a hash block is cached from now on, or no longer. Events are numbered from 1 in the life of
the process. Only the latest EVENTS_MAX are remembered. A reader that lacks older ones gets a snapshot: all
hash blocks that are cached after a certain event. Each event has a digest of what is cached after it, the XOR
of all hashes. So a reader finds out that it differs (`log-is-tree`).

Events carry no tokens, and no hash of the block before: routers look prompts up by their own hashes.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from baton.ids import PageId
from baton.pages.block_hashes import BLOCK_TOKENS, Block, next_hash, root_hash
from baton.pages.prefix_tree import TreeListener

EVENTS_MAX: Final = 16_384
"""Most events that are remembered for readers that lag behind."""
BATCH_MAX: Final = 4_096
"""Most events in one batch, and most hashes in one part of a snapshot."""


class KvEvent(NamedTuple):
    """One change of the set of cached hash blocks."""

    is_stored: bool
    """True if the block is cached from now on, False if it is no longer."""
    block: Block


class KvEvents(NamedTuple):
    """Events with ascending numbers without a gap. Without events it only says how far the log is."""

    first: int
    """Number of the first event. If there is none, of the next one that will be logged."""
    events: Sequence[KvEvent]
    digest: int
    """Digest of all cached blocks after the last of these events."""

    @property
    def last(self) -> int:
        return self.first + len(self.events) - 1


class KvSnapshotPart(NamedTuple):
    """Part of a snapshot of all cached hash blocks."""

    number: int
    """Number of the last event that the snapshot includes. Parts of one snapshot have the same."""
    part: int
    """Index of this part, from 0 on."""
    parts: int
    blocks: Sequence[Block]
    digest: int
    """Digest of all blocks of the whole snapshot."""


@dataclass(slots=True)
class _Logged:
    """Block of the prefix tree, as the log knows it."""

    parent: PageId
    chain: Block
    """Hash of the last hash block that ends at or before the end of this block."""
    ended: Sequence[Block]
    """Hashes of the hash blocks that end in this block. There is none in most blocks that are smaller."""
    children: int = 0


class KvEventLog:
    """Numbered changes of one prefix tree. It is a `TreeListener`, to be set before the tree has blocks."""

    def __init__(self, block_tokens: int, events_max: int = EVENTS_MAX) -> None:
        """Make the log of an empty tree. `block_tokens`: tokens per block of the tree."""
        self.block_tokens = block_tokens
        self._recent: deque[tuple[KvEvent, int]] = deque(maxlen=events_max)
        """Latest events, each with the digest after it."""
        self._logged: dict[PageId, _Logged] = {}
        """Blocks of the tree that lookups find. Each comes after its parent."""
        self._cached: Counter[Block] = Counter()
        """Number of tree blocks in which each hash block ends. Blocks of the tree that part within a hash
        block share it."""
        self.number = 0
        """Number of the last event, 0 before the first."""
        self.digest = 0
        self.further: TreeListener | None = None
        """Listener that is told of the blocks that lookups find, each once when it is stored and once when it
        is hidden."""
        self.on_event: set[Callable[[], None]] = set()
        """Functions that are called after each event."""

    def __len__(self) -> int:
        return len(self._cached)

    def __contains__(self, block: Block) -> bool:
        return block in self._cached

    def stored(self, parent: int, block: PageId, tokens: Sequence[int], start: int) -> None:
        """Log a new block of the tree. `parent`: its parent, or a negative root id. `tokens`: sequence in
        which it begins at index `start`. A block below a hidden one is not found, so it is not logged."""
        if parent < 0:
            chain = root_hash(-1 - parent)
        else:
            above = self._logged.get(PageId(parent))
            if above is None:
                return
            above.children += 1
            chain = above.chain
        ended: list[Block] = []
        first = start // BLOCK_TOKENS * BLOCK_TOKENS
        for at in range(first, start + self.block_tokens - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            chain = next_hash(chain, tokens[at : at + BLOCK_TOKENS])
            ended.append(chain)
        self._logged[block] = _Logged(PageId(parent), chain, ended)
        if self.further is not None:
            self.further.stored(parent, block, tokens, start)
        for each in ended:
            self._cached[each] += 1
            if self._cached[each] == 1:
                self._add(KvEvent(is_stored=True, block=each))

    def hidden(self, block: PageId) -> None:
        """Log that lookups do not find a block of the tree any more, nor any block below it."""
        gone = [block] if block in self._logged else []
        if gone and self._logged[block].children:
            below = {block}
            for each, known in self._logged.items():
                if known.parent in below:
                    below.add(each)
                    gone.append(each)
        for each in reversed(gone):
            known = self._logged.pop(each)
            if self.further is not None:
                self.further.hidden(each)
            if (above := self._logged.get(known.parent)) is not None:
                above.children -= 1
            for ended in known.ended:
                self._cached[ended] -= 1
                if not self._cached[ended]:
                    del self._cached[ended]
                    self._add(KvEvent(is_stored=False, block=ended))

    def after(self, number: int) -> KvEvents | None:
        """Return the events after the one with this number, at most BATCH_MAX. None if some of them are
        forgotten, or the number is not of this log: then `snapshot` helps."""
        missing = self.number - number
        if not 0 <= missing <= len(self._recent):
            return None
        if not missing:
            return KvEvents(number + 1, (), self.digest)
        begin = len(self._recent) - missing
        found = list(islice(self._recent, begin, begin + BATCH_MAX))
        return KvEvents(number + 1, [event for event, _ in found], found[-1][1])

    def snapshot(self) -> list[KvSnapshotPart]:
        """Return all cached hash blocks, in at least one part."""
        blocks = list(self._cached)
        cut = [blocks[at : at + BATCH_MAX] for at in range(0, len(blocks), BATCH_MAX)] or [[]]
        return [
            KvSnapshotPart(self.number, index, len(cut), part, self.digest) for index, part in enumerate(cut)
        ]

    def _add(self, event: KvEvent) -> None:
        self.number += 1
        self.digest ^= int.from_bytes(event.block, "big")
        self._recent.append((event, self.digest))
        for tell in tuple(self.on_event):
            tell()
