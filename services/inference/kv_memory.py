"""Memory of a rank for KV pages: the protocol that every engine's cache follows, and how many pages fit.

The cache does not know which sequence owns which page.
"""

from collections import abc
from typing import Final, Protocol

import torch

from baton.engine_interface import KvMemory
from baton.pages.layout import KvGroup
from baton.rooms.plurals import counted
from baton.runtime.errors import StartupError

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


def check_page_tokens(page_tokens: int, possible: abc.Collection[int], engine: str) -> None:
    """Raise StartupError unless `page_tokens` is one of the page sizes that `engine` supports.

    `possible`: these sizes, in tokens.
    """
    if page_tokens not in possible:
        sizes = ", ".join(map(str, sorted(possible)))
        raise StartupError(f"--page-tokens {page_tokens}: --engine {engine} has pages of {sizes} tokens here")
