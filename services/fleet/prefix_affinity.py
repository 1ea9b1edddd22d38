"""Which beginnings of prompts has a worker been sent, so that it may hold their KV still?

A guess that costs little: the bootstrap sees prompts, not caches. A prompt is cut into blocks; each is known
by a hash of itself and of all before it, so that two prompts share the hashes of what they share from the
start, and two of different salts none (`same-root-only`). A worker is remembered with as many blocks as its
cache could hold, the oldest forgotten first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final

from baton.rooms.request import SALT_BYTES

BLOCK_TOKENS: Final = 64
HASH_BYTES: Final = 16

Block = bytes


def hash_blocks(prompt: Sequence[int], salt: int = 0) -> tuple[Block, ...]:
    """Of each whole block of a prompt, from its start on."""
    found: list[Block] = []
    before = salt.to_bytes(SALT_BYTES, "big")
    for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        tokens = array("q", prompt[start : start + BLOCK_TOKENS]).tobytes()
        before = blake2b(before + tokens, digest_size=HASH_BYTES).digest()
        found.append(before)
    return tuple(found)


class SentPrefixes:
    """What one incarnation of a worker was sent."""

    def __init__(self, tokens_max: int) -> None:
        """`tokens_max`: what its cache holds."""
        self._limit = tokens_max // BLOCK_TOKENS
        self._blocks: OrderedDict[Block, None] = OrderedDict()
        self._awaited: dict[Block, int] = {}
        """Those that no room has computed yet, and in how many rooms they are to be."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def add(self, prompt: Sequence[Block]) -> tuple[list[Block], list[Block]]:
        """Last blocks first, so that a beginning is not forgotten before what follows it. Which of them are
        new, and which blocks are forgotten for them."""
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
        """A room is to compute a prompt, of which these are new. Those of it that none has computed yet."""
        first = set(new)
        awaited = [block for block in prompt if block in first or block in self._awaited]
        for block in awaited:
            self._awaited[block] = self._awaited.get(block, 0) + 1
        return awaited

    def computed(self, awaited: Sequence[Block]) -> None:
        """A room has computed what was awaited of it."""
        for block in awaited:
            self._awaited.pop(block, None)

    def given_up(self, awaited: Sequence[Block]) -> list[Block]:
        """A room does not compute what was awaited of it. Those that no other computes either."""
        left = []
        for block in awaited:
            rooms = self._awaited.pop(block, 0)
            if rooms > 1:
                self._awaited[block] = rooms - 1
            elif rooms:
                left.append(block)
        return left

    def drop(self, blocks: Sequence[Block]) -> list[Block]:
        """Those of them that are remembered, which are forgotten."""
        known = [block for block in blocks if block in self._blocks]
        for block in known:
            del self._blocks[block]
        return known

    def tokens(self, prompt: Sequence[Block]) -> int:
        """How many leading tokens of a prompt are among it."""
        known = 0
        for block in prompt:
            if block not in self._blocks:
                break
            known += BLOCK_TOKENS
        return known
