"""KV memory of a rank as every engine has it: its protocol, and how many pages fit.

Which sequence owns which page is not known here.
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
    """The KV cache cannot be allocated, or would be too small. The text has both sizes."""


class KvCache(KvMemory, Protocol):
    """Pages of one KV group on one rank. Page p is at byte `p * group.page_bytes`."""

    @property
    def group(self) -> KvGroup: ...

    @property
    def tensor(self) -> torch.Tensor:
        """[page][kv head][layer][plane][token][elements], contiguous. With an encoding, an engine may store
        elements of a (page, head, layer) in another order. Another tensor after each `move`."""

    @property
    def tokens(self) -> int:
        """Number of tokens that fit."""

    def populate(self) -> None:
        """Have the system provide all of the memory now."""


def pages_that_fit(group: KvGroup, memory_bytes: int, tokens_min: int = 1) -> int:
    """Return how many pages fit into `memory_bytes`. Raises NotEnoughMemory for less than `tokens_min`
    tokens."""
    pages, needed = memory_bytes // group.page_bytes, group.pages_for(tokens_min)
    if pages < needed:
        raise NotEnoughMemory(
            f"--kv-cache-memory {memory_bytes} holds {counted(pages, 'page')} of {group.page_tokens} tokens,"
            f" and {needed} are needed at least: {needed * group.page_bytes} bytes"
        )
    return pages


def check_page_tokens(page_tokens: int, possible: abc.Collection[int], engine: str) -> None:
    """Raise StartupError unless `page_tokens` is one of the sizes that `engine` can have."""
    if page_tokens not in possible:
        sizes = ", ".join(map(str, sorted(possible)))
        raise StartupError(f"--page-tokens {page_tokens}: --engine {engine} has pages of {sizes} tokens here")
