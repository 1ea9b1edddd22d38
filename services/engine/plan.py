"""Which token of a step is read and written where?

A step's rows become one flat batch: first the rows of a single token, longest first, in groups of similar
length that are computed together; then the longer rows one by one. Every index tensor is made here, once a
step, and serves all layers.
"""

from collections import abc
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from services.engine.kv_cache import PagedKvCache
from services.engine.rows import Row


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that attend together: B rows of one token each, or one row of several tokens (B = 1)."""

    begin: int
    end: int
    """Their tokens in the flat batch are [begin, end)."""
    blocks: torch.Tensor
    """[K/V, B, kv heads, pages] flattened: what the cache's `read` fetches."""
    fetched: torch.Tensor
    """[2, B, kv heads, pages * page_tokens, head_dim]: room for it, used by layer after layer."""
    mask: torch.Tensor
    """Added to the scores: 0 where a token may look, -inf elsewhere. [B, 1, 1, pages * page_tokens] for
    single tokens, [tokens, stop] for one row."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A row that starts at position 0: its tokens look at each other, and nothing is read."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. T tokens, N rows that sample."""

    tokens: torch.Tensor
    """[1, T] ids."""
    positions: torch.Tensor
    """[1, T]"""
    write: torch.Tensor
    """[T * kv heads]: what the cache's `write` takes, token by token."""
    singles: tuple[Group, ...]
    prefixed: tuple[Group, ...]
    wholes: tuple[Whole, ...]
    keep: torch.Tensor
    """[N] places in the flat batch whose logits are wanted, in the order of the step's rows."""


def groups_of_similar_length(pages: abc.Sequence[int]) -> list[int]:
    """Cut a descending list of page counts where they fall below half: where each group ends.

    Rows of a group are padded to its longest, so at most half of what is read is padding.
    """
    ends: list[int] = []
    longest = pages[0] if pages else 0
    for place, count in enumerate(pages):
        if 2 * count < longest:
            ends.append(place)
            longest = count
    return [*ends, len(pages)] if pages else []


def make_plan(rows: abc.Sequence[Row], cache: PagedKvCache, device: torch.device) -> Plan:
    """Lay the checked `rows` of a step out. Moves to `device` what it needs, in one copy."""
    size = cache.layout.page_tokens
    order = sorted(
        range(len(rows)),
        key=lambda each: (rows[each].stop - rows[each].start > 1, -rows[each].stop),
    )
    laid = [rows[each] for each in order]
    single_count = sum(row.stop - row.start == 1 for row in laid)
    lengths = [-(-row.stop // size) for row in laid]

    tokens = list(chain.from_iterable(row.sequence.tokens(row.start, row.stop) for row in laid))
    positions = list(chain.from_iterable(range(row.start, row.stop) for row in laid))
    homes = [row.pages[place // size] for row in laid for place in range(row.start, row.stop)]
    begins = [0]
    for row in laid:
        begins.append(begins[-1] + row.stop - row.start)
    last = {each: begins[place + 1] - 1 for place, each in enumerate(order)}
    keep = [last[each] for each, row in enumerate(rows) if row.sample]

    reads = _reads(laid, single_count, lengths, size)
    packed = torch.tensor([*tokens, *positions, *homes, *keep, *chain(*(read.table for read in reads))])
    sizes = [len(tokens)] * 3 + [len(keep)] + [len(read.table) for read in reads]
    ids, where, pages, kept, *tables = torch.split(packed.to(device), sizes)

    singles, prefixed = [], []
    for read, table in zip(reads, tables, strict=True):
        begin, end = begins[read.first], begins[read.end]
        width = lengths[read.first] * size if read.end <= single_count else laid[read.first].stop
        mask = _mask(where[begin:end], width, cache)
        if read.end <= single_count:
            pages_of_rows, mask = table.view(read.end - read.first, -1), mask[:, None, None]
            singles.append(_group(begin, end, pages_of_rows, mask, cache))
        else:
            prefixed.append(_group(begin, end, table[None], mask, cache))
    wholes = [
        Whole(begins[place], begins[place + 1])
        for place in range(single_count, len(laid))
        if laid[place].start == 0
    ]
    return Plan(
        tokens=ids[None],
        positions=where[None],
        write=_write_rows(pages, where, cache),
        singles=tuple(singles),
        prefixed=tuple(prefixed),
        wholes=tuple(wholes),
        keep=kept,
    )


class _Read(NamedTuple):
    """The rows [first, end) of the laid-out step read together, from these pages, equally many a row."""

    first: int
    end: int
    table: list[int]


def _reads(laid: abc.Sequence[Row], single_count: int, lengths: list[int], size: int) -> list[_Read]:
    reads: list[_Read] = []
    first = 0
    for end in groups_of_similar_length(lengths[:single_count]):
        reads.append(_Read(first, end, _table(laid[first:end], lengths[first], size)))
        first = end
    reads.extend(
        _Read(place, place + 1, _table([laid[place]], lengths[place], size))
        for place in range(single_count, len(laid))
        if laid[place].start > 0
    )
    return reads


def _table(rows: abc.Sequence[Row], pages: int, page_tokens: int) -> list[int]:
    """The rows' page tables, `pages` long each: a shorter one is filled up with its own first page, whose
    contents are numbers, and which the mask hides."""
    table: list[int] = []
    for row in rows:
        used = -(-row.stop // page_tokens)
        table.extend(row.pages[:used])
        table.extend([row.pages[0]] * (pages - used))
    return table


def _write_rows(pages: torch.Tensor, positions: torch.Tensor, cache: PagedKvCache) -> torch.Tensor:
    size = cache.layout.page_tokens
    heads = torch.arange(len(cache.layout.kv_heads), device=pages.device) * cache.rows_per_head
    return ((pages * cache.rows_per_page + positions % size)[:, None] + heads).flatten()


def _group(begin: int, end: int, table: torch.Tensor, mask: torch.Tensor, cache: PagedKvCache) -> Group:
    layout = cache.layout
    rows, pages = table.shape
    heads = len(layout.kv_heads)
    halves = torch.arange(2, device=table.device).view(2, 1, 1, 1)
    firsts = torch.arange(heads, device=table.device).view(1, 1, heads, 1) * cache.blocks_per_head
    return Group(
        begin,
        end,
        blocks=(table.view(1, rows, 1, pages) * cache.blocks_per_page + firsts + halves).flatten(),
        fetched=cache.tensor.new_empty(2, rows, heads, pages * layout.page_tokens, layout.head_dim),
        mask=mask,
    )


def _mask(positions: torch.Tensor, width: int, cache: PagedKvCache) -> torch.Tensor:
    """[positions, width]: 0 up to each position, -inf behind it."""
    hidden = torch.arange(width, device=positions.device) > positions[:, None]
    return cache.tensor.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
