"""Memory of a rank for KV pages: the protocol that every engine's cache follows, and how many pages fit.

The cache does not know which sequence owns which page.
"""

from collections import abc
from math import lcm
from typing import Final, Protocol

import torch

from baton.engine_interface import KvMemory
from baton.ids import PageCounts
from baton.pages.layout import KvGroup
from baton.rooms.plurals import counted
from baton.runtime.errors import StartupError

EXPECTED_TOKENS: Final = 4096
"""Tokens of a sequence for which memory is divided among KV groups, unless a setting gives another number."""
DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class NotEnoughMemory(StartupError):
    """The KV cache cannot be allocated, or would be too small. The text has the available and the needed
    size."""


class KvCache(KvMemory, Protocol):
    """Memory for the pages of one KV group on one rank. Page p starts at byte `p * group.page_bytes`."""

    @property
    def group(self) -> KvGroup: ...

    @property
    def tensor(self) -> torch.Tensor:
        """All pages as one contiguous tensor: [page][kv head][layer][plane][token][elements].

        Pages of states are [page][kv head][layer][elements of all planes].
        If the pages have an encoding, an engine may store the elements of a (page, head, layer) in another
        order. After each `move` it is another tensor.
        """

    @property
    def tokens(self) -> int:
        """Number of tokens whose keys and values fit into all pages."""

    def populate(self) -> None:
        """Have the operating system provide all of the memory now, before it is first used."""


def pages_that_fit(group: KvGroup, memory_bytes: int, tokens_min: int = 1) -> int:
    """Return the number of `group`'s KV pages that fit into `memory_bytes`.

    Raises NotEnoughMemory if they hold less than `tokens_min` tokens.
    """
    pages, needed = memory_bytes // group.page_bytes, group.pages_for(tokens_min)
    if pages < needed:
        raise NotEnoughMemory(
            f"--kv-cache-memory {memory_bytes} holds {counted(pages, 'page')} of {group.page_tokens} tokens,"
            f" and {needed} are needed at least: {needed * group.page_bytes} bytes"
        )
    return pages


def divide_memory(
    groups: abc.Sequence[KvGroup], memory_bytes: int, tokens_min: int = 1, expected_tokens: int = 0
) -> PageCounts:
    """Return how many pages of each of `groups` together fit into `memory_bytes`.

    All groups run out together if sequences have `expected_tokens` tokens. The default is `EXPECTED_TOKENS`,
    or the context length if that is less. Raises NotEnoughMemory if some group's pages hold less than
    `tokens_min` tokens.
    """
    if len(groups) == 1:
        return (pages_that_fit(groups[0], memory_bytes, tokens_min),)
    context_length = max((group.page_tokens for group in groups if group.is_state), default=EXPECTED_TOKENS)
    expected = min(expected_tokens or EXPECTED_TOKENS, context_length)
    block = lcm(*(group.page_tokens for group in groups if not group.is_state))
    expected = -(-expected // block) * block
    needed = sum(group.pages_for(expected) * group.page_bytes for group in groups)
    pages = tuple(memory_bytes * group.pages_for(expected) // needed for group in groups)
    if any(count < group.pages_for(tokens_min) for count, group in zip(pages, groups, strict=True)):
        least = sum(group.pages_for(tokens_min) * group.page_bytes for group in groups)
        told = ", ".join(
            f"{counted(count, 'page')} of {group.kind.value} KV"
            for count, group in zip(pages, groups, strict=True)
        )
        raise NotEnoughMemory(
            f"--kv-cache-memory {memory_bytes} holds {told} for sequences of {expected} tokens; one of"
            f" {tokens_min} tokens needs {least} bytes, and --expected-context divides the memory"
        )
    return pages


def check_page_tokens(page_tokens: int, possible: abc.Collection[int], engine: str) -> None:
    """Raise StartupError unless `page_tokens` is one of the page sizes that `engine` supports.

    `possible`: these sizes, in tokens.
    """
    if page_tokens not in possible:
        sizes = ", ".join(map(str, sorted(possible)))
        raise StartupError(f"--page-tokens {page_tokens}: --engine {engine} has pages of {sizes} tokens here")
