"""Rows of a step for an attention kernel that reads keys and values in their pages."""

from collections import abc
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from baton.engine.execution.attention_span import LayerAttention
from baton.engine_interface import Row


class UnsupportedAttention(Exception):
    """A kernel lacks an attention option. The message names the option."""


class PagedKernel(Protocol):
    """Attention over keys and values in their pages."""

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: "PagedRows",
        attention: LayerAttention,
    ) -> torch.Tensor:
        """Return the attention results [T, query heads, head_dim].

        `query`: [T, query heads, head_dim], the rows' tokens, row after row.
        `keys`, `values`: [pages, page_tokens, kv heads, head_dim] of one layer, strided, the whole cache. The
        rows' own tokens are in it.
        Raises UnsupportedAttention.
        """


@dataclass(frozen=True, slots=True)
class PagedRows:
    """N rows of any lengths that attend in one kernel call."""

    begin: int
    end: int
    """Their tokens in the flat batch are [begin, end)."""
    begins: torch.Tensor
    """[N + 1] int32: index at which each row's tokens begin among the tokens of these rows, and at which the
    last row ends."""
    stops: torch.Tensor
    """[N] int32: number of tokens in each row's pages. The row's own tokens are the last of them."""
    tables: torch.Tensor
    """[N, P] int32: page tables."""
    longest: int
    """Most tokens of a row in this step."""
    kernel: PagedKernel

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attention: LayerAttention
    ) -> torch.Tensor:
        """Return the attention results of these rows. Arguments as in `PagedKernel`."""
        return self.kernel(query, keys, values, self, attention)


def pack(rows: abc.Sequence[Row], page_tokens: int) -> list[int]:
    """Return page tables, lengths and borders of `rows` as one list of integers, which `unpack` takes."""
    begins = accumulate((row.stop - row.start for row in rows), initial=0)
    pages = max(-(-row.stop // page_tokens) for row in rows)
    return [*begins, *(row.stop for row in rows), *page_table(rows, pages, page_tokens)]


def unpack(
    packed: torch.Tensor, rows: abc.Sequence[Row], begin: int, end: int, kernel: PagedKernel
) -> PagedRows:
    """Return `rows` in the form that `kernel` reads.

    `packed`: result of `pack`, on the device. `begin`, `end`: the rows' tokens in the flat batch.
    """
    count = len(rows)
    begins, stops, tables = torch.split(packed.int(), [count + 1, count, len(packed) - 2 * count - 1])
    longest = max(row.stop - row.start for row in rows)
    return PagedRows(begin, end, begins, stops, tables.view(count, -1), longest, kernel)


def page_table(rows: abc.Sequence[Row], pages: int, page_tokens: int) -> list[int]:
    """Return the rows' page tables, one after the other, with `pages` entries each.

    A shorter table is filled with its own first page: its contents are finite numbers, and a mask or length
    hides them.
    """
    table: list[int] = []
    for row in rows:
        used = -(-row.stop // page_tokens)
        table.extend(row.pages[:used])
        table.extend([row.pages[0]] * (pages - used))
    return table
