"""Which token of a step is read and written where?

A step's rows become one flat batch: first the rows of a single token, longest first, in groups of similar
length that are computed together; then the longer rows one by one. Every index tensor is made here, once a
step, and serves all layers.
"""

from collections import abc
from dataclasses import dataclass
from itertools import chain

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

    tables: list[tuple[int, int, list[int]]] = []
    first = 0
    for end in groups_of_similar_length(lengths[:single_count]):
        tables.append((first, end, _table(laid[first:end], lengths[first], size)))
        first = end
    tables.extend(
        (place, place + 1, _table([laid[place]], lengths[place], size))
        for place in range(single_count, len(laid))
        if laid[place].start > 0
    )

    packed = torch.tensor([*tokens, *positions, *homes, *keep, *chain(*(table for _, _, table in tables))])
    sizes = [len(tokens)] * 3 + [len(keep)] + [len(table) for _, _, table in tables]
    ids, where, pages, kept, *page_tables = torch.split(packed.to(device), sizes)

    singles, prefixed = [], []
    for (first, end, _), table in zip(tables, page_tables, strict=True):
        begin, finish = begins[first], begins[end]
        if end <= single_count:
            mask = _single_mask(where[begin:finish], lengths[first] * size, cache)
            singles.append(_group(begin, finish, table.view(end - first, -1), mask, cache))
        else:
            mask = _prefix_mask(where[begin:finish], laid[first].stop, cache)
            prefixed.append(_group(begin, finish, table.view(1, -1), mask, cache))
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
    heads = torch.arange(len(cache.layout.kv_heads), device=pages.device) * size
    return ((pages * cache.rows_per_page + positions % size)[:, None] + heads).flatten()


def _group(begin: int, end: int, table: torch.Tensor, mask: torch.Tensor, cache: PagedKvCache) -> Group:
    layout = cache.layout
    rows, pages = table.shape
    heads = len(layout.kv_heads)
    halves = torch.arange(2 * heads, device=table.device).view(2, 1, heads, 1)
    return Group(
        begin,
        end,
        blocks=(table.view(1, rows, 1, pages) * cache.blocks_per_page + halves).flatten(),
        fetched=cache.tensor.new_empty(2, rows, heads, pages * layout.page_tokens, layout.head_dim),
        mask=mask,
    )


def _single_mask(positions: torch.Tensor, width: int, cache: PagedKvCache) -> torch.Tensor:
    hidden = torch.arange(width, device=positions.device) > positions[:, None]
    return _additive(hidden, cache).view(-1, 1, 1, width)


def _prefix_mask(positions: torch.Tensor, stop: int, cache: PagedKvCache) -> torch.Tensor:
    return _additive(torch.arange(stop, device=positions.device) > positions[:, None], cache)


def _additive(hidden: torch.Tensor, cache: PagedKvCache) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=cache.tensor.dtype, device=hidden.device).masked_fill_(
        hidden, float("-inf")
    )
