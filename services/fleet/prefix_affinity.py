"""Prompt prefixes that each worker was sent, as an estimate of what its prefix cache holds or soon will.

A worker's log says what is cached there (`baton.fleet.kv_event_reader`). Prompts are sent before the log
shows them. A worker without a log, and one whose log the router lacks, is judged by this estimate alone. For
each worker, as many blocks are remembered as its cache could hold. The oldest are forgotten first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from baton.pages.block_hashes import BLOCK_TOKENS, Block


class SentPrefixes:
    """Blocks of prompts that one worker was sent, and so may have in its prefix cache."""

    def __init__(self, tokens_max: int) -> None:
        """Make an empty set of blocks. `tokens_max`: number of KV positions in the worker's cache."""
        self._limit = tokens_max // BLOCK_TOKENS
        self._blocks: OrderedDict[Block, None] = OrderedDict()
        self.awaited: dict[Block, int] = {}
        """Number of rooms that are about to compute a block, for each block that no room has computed yet."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: Block) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def add(self, prompt: Sequence[Block]) -> tuple[list[Block], list[Block]]:
        """Add the blocks of a prompt. Return the blocks that are new, and those that were forgotten to make
        space.

        The last blocks of the prompt are added first, so that a prefix is not forgotten before the blocks
        after it.
        """
        new: list[Block] = []
        for block in reversed(prompt):
            if block in self._blocks:
                self._blocks.move_to_end(block)
            else:
                self._blocks[block] = None
                new.append(block)
        forgotten = [self._blocks.popitem(last=False)[0] for _ in range(len(self) - self._limit)]
        return new, forgotten

    def expect(self, prompt: Sequence[Block], new: Sequence[Block]) -> list[Block]:
        """Record that a room is about to compute a prompt. Return those of the prompt's blocks that no room
        on the worker has computed yet.

        `new`: blocks of the prompt that the worker has not got before.
        """
        first = set(new)
        awaited = [block for block in prompt if block in first or block in self.awaited]
        for block in awaited:
            self.awaited[block] = self.awaited.get(block, 0) + 1
        return awaited

    def mark_computed(self, awaited: Sequence[Block]) -> None:
        """Record that a room has computed its prompt. `awaited`: blocks that `expect` returned for this
        room."""
        for block in awaited:
            self.awaited.pop(block, None)

    def abandon(self, awaited: Sequence[Block]) -> list[Block]:
        """Record that a room will not compute the blocks that `expect` returned for it. Return those that no
        other room will compute either."""
        left = []
        for block in awaited:
            rooms = self.awaited.pop(block, 0)
            if rooms > 1:
                self.awaited[block] = rooms - 1
            elif rooms:
                left.append(block)
        return left

    def drop(self, blocks: Iterable[Block]) -> list[Block]:
        """Forget that the worker got these blocks. Return those of them that were remembered."""
        known = [block for block in blocks if block in self._blocks]
        for block in known:
            del self._blocks[block]
        return known
