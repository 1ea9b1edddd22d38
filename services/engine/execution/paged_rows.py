"""Rows of a step in the form that an attention kernel reads which works on pages in place."""

from collections import abc
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from baton.engine.execution.attention_span import LayerAttention
from baton.engine_interface import Row


class UnsupportedAttention(Exception):
    """An attention kernel lacks an attention option that a layer needs. The message names the option."""


class PagedKernel(Protocol):
    """Attention kernel that reads keys and values in their pages, without copying them first."""

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
        `keys`, `values`: [pages, page_tokens, kv heads, head_dim], strided: the whole cache of one layer. The
        rows' own tokens are in it.
        Raises UnsupportedAttention.
        """


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Group of N rows of any lengths that attend in one kernel call."""

    begin: int
    end: int
    """Index behind the last of these rows' tokens in the flat batch. The rows' tokens are [begin, end)."""
    begins: torch.Tensor
    """Index at which each row's tokens begin among the tokens of these rows, and the end of the last row.

    [N + 1], int32.
    """
    stops: torch.Tensor
    """Number of tokens in each row's pages, [N], int32. The row's own tokens are the last of them."""
    tables: torch.Tensor
    """Page table of each row, as page indices in the order of positions: [N, P], int32."""
    longest: int
    """Number of tokens computed in this step for that one of these rows that has the most."""
    kernel: PagedKernel

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attention: LayerAttention
    ) -> torch.Tensor:
        """Return the attention results of these rows, computed by the kernel. Arguments as in
        `PagedKernel`."""
        return self.kernel(query, keys, values, self, attention)


def pack(rows: abc.Sequence[Row], page_tokens: int) -> list[int]:
    """Return row borders, lengths and page tables of `rows` as one list of integers, which `unpack` reads."""
    begins = accumulate((row.stop - row.start for row in rows), initial=0)
    pages = max(-(-row.stop // page_tokens) for row in rows)
    return [*begins, *(row.stop for row in rows), *page_table(rows, pages, page_tokens)]


def unpack(
    packed: torch.Tensor, rows: abc.Sequence[Row], begin: int, end: int, kernel: PagedKernel
) -> PagedRows:
    """Return `rows` in the form that `kernel` reads.

    `packed`: result of `pack`, on the device. The rows' tokens in the flat batch are [begin, end).
    """
    count = len(rows)
    begins, stops, tables = torch.split(packed.int(), [count + 1, count, len(packed) - 2 * count - 1])
    longest = max(row.stop - row.start for row in rows)
    return PagedRows(begin, end, begins, stops, tables.view(count, -1), longest, kernel)


def page_table(rows: abc.Sequence[Row], pages: int, page_tokens: int) -> list[int]:
    """Return the rows' page tables, one after the other, with `pages` entries each.

    A shorter table is filled up with its own first page. The contents of that page are finite numbers, and a
    mask or length hides them.
    """
    table: list[int] = []
    for row in rows:
        used = -(-row.stop // page_tokens)
        table.extend(row.pages[:used])
        table.extend([row.pages[0]] * (pages - used))
    return table
