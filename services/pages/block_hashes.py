"""Hashes by which routers and workers name the beginnings of prompts.

A prompt is cut into hash blocks of BLOCK_TOKENS tokens. A block's hash covers itself and all tokens before
it. So two prompts have the hashes of their common prefix in common. Prompts with different salts have none in
common (`same-root-only`). Hash blocks do not depend on the page sizes of workers.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from baton.ids import SALT_BYTES

BLOCK_TOKENS: Final = 64
HASH_BYTES: Final = 16

Block = bytes
"""Hash of one block of a prompt, of HASH_BYTES bytes."""


def root_hash(salt: int) -> Block:
    """Return the hash before the first block of a prompt with this cache salt."""
    return salt.to_bytes(SALT_BYTES, "big")


def next_hash(before: Block, tokens: Sequence[int]) -> Block:
    """Return the hash of a block. `before`: hash of the block before it. `tokens`: its BLOCK_TOKENS ids."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=HASH_BYTES).digest()


def hash_blocks(prompt: Sequence[int], salt: int = 0) -> tuple[Block, ...]:
    """Return the hash of each whole block of a prompt, in order. Prompts with different salts have no hash in
    common."""
    found: list[Block] = []
    before = root_hash(salt)
    for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        before = next_hash(before, prompt[start : start + BLOCK_TOKENS])
        found.append(before)
    return tuple(found)
