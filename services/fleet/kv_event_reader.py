"""Reader of a worker's KV event log, under any loss, repetition and reordering of messages.

The reader has the worker's set of cached hash blocks, or knows that it has not (`log-is-tree`). It then needs
a snapshot. Until that has come, the set that it had serves as an estimate.
"""

from collections.abc import Iterable
from typing import NamedTuple

from baton.pages.block_hashes import Block
from baton.pages.kv_event_log import KvEvents, KvSnapshotPart


class KvChange(NamedTuple):
    """Difference that messages of the log made to the reader's set."""

    stored: frozenset[Block] = frozenset()
    removed: frozenset[Block] = frozenset()
    passed: frozenset[Block] = frozenset()
    """Blocks that were cached and removed again, so that they are not in the set."""


NO_CHANGE = KvChange()


class KvEventReader:
    """Set of hash blocks that a worker has cached, according to its log. One reader is for one incarnation of
    one worker."""

    def __init__(self, blocks_max: int) -> None:
        """Make an empty reader that needs a snapshot. `blocks_max`: most hash blocks that the worker's cache
        can hold. A log with more is not believed."""
        self._blocks_max = blocks_max
        self.blocks: set[Block] = set()
        self.number = 0
        """Number of the last event that is included in `blocks`."""
        self.is_current = False
        """Whether `blocks` is exactly what the worker had cached after event `number`. Otherwise the reader
        needs a snapshot."""
        self._digest = 0
        self._parts: dict[int, KvSnapshotPart] = {}
        """Parts of the newest snapshot that has not come whole, by index."""

    def read_events(self, batch: KvEvents) -> KvChange:
        """Apply events that follow those which the reader has. Repeated events are left out. A gap makes the
        reader need a snapshot."""
        if not self.is_current or batch.last < self.number:
            return NO_CHANGE
        if batch.first > self.number + 1:
            self.is_current = False
            return NO_CHANGE
        last: dict[Block, bool] = {}
        for event in batch.events[self.number + 1 - batch.first :]:
            self._digest ^= int.from_bytes(event.block, "big")
            last[event.block] = event.is_stored
        stored = frozenset(block for block, is_stored in last.items() if is_stored) - self.blocks
        gone = frozenset(block for block, is_stored in last.items() if not is_stored)
        removed = gone & self.blocks
        self.number = batch.last
        self.blocks |= stored
        self.blocks -= removed
        self._check(batch.digest)
        return KvChange(stored, removed, gone - removed)

    def read_part(self, part: KvSnapshotPart) -> KvChange:
        """Take a part of a snapshot. Once all parts are there, the reader has the worker's set. A snapshot is
        ignored if the reader has a newer set, or has begun a newer snapshot."""
        newest = next(iter(self._parts.values()), None)
        is_old = self.is_current and part.number <= self.number
        if is_old or (newest is not None and part.number < newest.number):
            return NO_CHANGE
        if newest is not None and newest._replace(part=part.part, blocks=part.blocks) != part:
            self._parts.clear()
        self._parts[part.part] = part
        if sum(len(each.blocks) for each in self._parts.values()) > self._blocks_max:
            self._parts.clear()
            return NO_CHANGE
        if len(self._parts) < part.parts:
            return NO_CHANGE
        whole = {block for each in self._parts.values() for block in each.blocks}
        self._parts.clear()
        change = KvChange(frozenset(whole - self.blocks), frozenset(self.blocks - whole))
        self.blocks, self.number, self._digest = whole, part.number, digest_of(whole)
        self.is_current = True
        self._check(part.digest)
        return change

    def _check(self, digest: int) -> None:
        """Stop believing in the set if it differs from the worker's, or is larger than its cache."""
        self.is_current = self._digest == digest and len(self.blocks) <= self._blocks_max


def digest_of(blocks: Iterable[Block]) -> int:
    """Return the digest of a set of hash blocks, as the log computes it."""
    digest = 0
    for block in blocks:
        digest ^= int.from_bytes(block, "big")
    return digest
