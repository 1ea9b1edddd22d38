"""Which rows does a kernel look at in one call, in the pages where they lie?"""

from collections import abc
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from baton.engine.execution.attention_span import LayerAttention
from baton.engine.kv_cache import PagedKvCache
from baton.engine_interface import Row


class UnsupportedAttention(Exception):
    """A kernel cannot look so. The text says at what."""


class PagedKernel(Protocol):
    """Looks at keys and values in their pages."""

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: "PagedRows",
        sight: LayerAttention,
    ) -> torch.Tensor:
        """`query` [T, query heads, head_dim]: the rows' tokens, one row after the other. `keys`, `values`
        [pages, page_tokens, kv heads, head_dim]: one layer's of the whole cache, with strides, the rows' own
        among them. Returns [T, query heads, head_dim]. Raises UnsupportedAttention for one that it does not have."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    """N of them, of any lengths."""

    begin: int
    end: int
    """Their tokens in the flat batch are [begin, end)."""
    begins: torch.Tensor
    """[N + 1] int32: where each row's tokens begin among these, and where the last's end."""
    stops: torch.Tensor
    """[N] int32: how many tokens lie in a row's pages. Its own are the last of them."""
    tables: torch.Tensor
    """[N, P] int32: the rows' pages."""
    longest: int
    """Most tokens of a row."""
    kernel: PagedKernel

    def look(
        self, cache: PagedKvCache, layer: int, query: torch.Tensor, sight: LayerAttention
    ) -> torch.Tensor:
        """At the layer with that id; the rest as `PagedKernel`."""
        keys, values = cache.kinds(layer)
        return self.kernel(query, keys, values, self, sight)


def pack(rows: abc.Sequence[Row], page_tokens: int) -> list[int]:
    """What `unpack` takes of these rows, side by side."""
    begins = accumulate((row.stop - row.start for row in rows), initial=0)
    pages = max(-(-row.stop // page_tokens) for row in rows)
    return [*begins, *(row.stop for row in rows), *page_table(rows, pages, page_tokens)]


def unpack(
    packed: torch.Tensor, rows: abc.Sequence[Row], begin: int, end: int, kernel: PagedKernel
) -> PagedRows:
    """`rows`, whose tokens in the flat batch are [begin, end), from what `pack` gave of them, which is on the
    device."""
    count = len(rows)
    begins, stops, tables = torch.split(packed.int(), [count + 1, count, len(packed) - 2 * count - 1])
    longest = max(row.stop - row.start for row in rows)
    return PagedRows(begin, end, begins, stops, tables.view(count, -1), longest, kernel)


def page_table(rows: abc.Sequence[Row], pages: int, page_tokens: int) -> list[int]:
    """The rows' page tables, `pages` long each: a shorter one is filled up with its own first page, whose
    contents are numbers, and which nobody looks at in its place."""
    table: list[int] = []
    for row in rows:
        used = -(-row.stop // page_tokens)
        table.extend(row.pages[:used])
        table.extend([row.pages[0]] * (pages - used))
    return table
