"""Layout of a step: its rows as one flat batch, and the index tensors that all layers use.

Rows of a single token come first, in groups of similar length that are computed together. Longer rows follow
one by one. All index tensors of a step are made here once, in one copy to the device.
"""

from array import array
from collections import abc
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Final, NamedTuple

import torch

from baton.engine.execution.attention_span import AttentionSpan
from baton.engine.kv_cache import PagedKvCache
from baton.engine_interface import Row

PADDING_MAX: Final = 24
"""Most pages of padding in a group of rows of similar length.

Reading and attending to more padding costs as much as the calls for another group.
"""


class AttentionMasks:
    """Additive attention masks of the same tokens, one for each span among the layers.

    Each mask is made on first use.
    """

    def __init__(self, make: abc.Callable[[AttentionSpan | None], torch.Tensor], width: int) -> None:
        """Store the function `make`, which returns the mask for a span. `width`: number of key positions in a
        mask."""
        self._make = make
        self._width = width
        self._made: dict[AttentionSpan | None, torch.Tensor] = {}

    def of(self, span: AttentionSpan | None) -> torch.Tensor:
        """Return the mask for `span`, made at its first use. A span too long to hide any key is treated as
        None."""
        if span is not None and not span.binds(self._width):
            span = None
        if span not in self._made:
            self._made[span] = self._make(span)
        return self._made[span]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Group of B rows of one token each that attend together, padded to the longest of them."""

    begin: int
    end: int
    """Index behind the last of these rows' tokens in the flat batch. The rows' tokens are [begin, end)."""
    pages: torch.Tensor
    """Page ids of all rows, row after row, with the same number of pages for each row. Argument `pages` of
    the cache's `read`."""
    buffer: torch.Tensor
    """Tensor into which the cache's `read` copies pages, reused in each layer.

    `keys` and `values` are views of it.
    """
    keys: torch.Tensor
    """Keys of the layer just read: [kv heads * B, S, head_dim], where S is the tokens of all pages of a
    row. With latents (MLA), these, of one head."""
    values: torch.Tensor
    """Values of the layer just read: [kv heads * B, S, head_dim]. With latents, these once more."""
    masks: AttentionMasks
    """Masks [kv heads * B, 1, S] that are added to the scores: 0 for visible keys, -inf for others."""

    def fold(self, query: torch.Tensor) -> torch.Tensor:
        """Reshape queries [B, query heads, head_dim] to [kv heads * B, query heads per kv head, head_dim]."""
        rows, _, head_dim = query.shape
        folded = query.view(rows, len(self.keys) // rows, -1, head_dim)
        return folded.transpose(0, 1).reshape(len(self.keys), -1, head_dim)

    def unfold(self, attended: torch.Tensor) -> torch.Tensor:
        """Reshape attention results from the shape of `fold` back to [B, query heads, head_dim]."""
        rows, head_dim = self.end - self.begin, attended.shape[2]
        return attended.view(len(self.keys) // rows, rows, -1, head_dim).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class ContinuedRow:
    """A row of several tokens whose earlier tokens are in its pages already (chunked prefill)."""

    begin: int
    end: int
    pages: torch.Tensor
    buffer: torch.Tensor
    keys: torch.Tensor
    """Keys [kv heads, S, head_dim] of all S tokens up to the row's last one, in the layer just read."""
    values: torch.Tensor
    masks: AttentionMasks
    """Attention masks [tokens, S] of this row's tokens. Not used on a CPU, which attends in blocks with masks
    of their own."""


@dataclass(frozen=True, slots=True)
class FirstRow:
    """A row of several tokens that starts at position 0: its tokens attend to each other, and no page is
    read."""

    begin: int
    end: int
    masks: AttentionMasks
    """Attention masks of the row's tokens, used in layers whose span hides some of them from others."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Layout of one step with T tokens, N of which have logits that are wanted."""

    tokens: torch.Tensor
    """Token ids of the flat batch, [1, T]."""
    positions: torch.Tensor
    """Position of each token in its sequence, [1, T]."""
    write: torch.Tensor
    """Indices of the rows of the KV cache to which the step's keys and values are written: [T * planes * kv
    heads], token by token, keys first. Argument of the cache's `write`."""
    groups: tuple[DecodeGroup, ...]
    only_group: DecodeGroup | None
    """The only group of rows, if one group contains all rows of the step, else None."""
    continued: tuple[ContinuedRow, ...]
    firsts: tuple[FirstRow, ...]
    keep: torch.Tensor
    """Indices [N] in the flat batch of tokens whose logits are wanted, in the order of the step's rows and
    positions."""


def divide_rows(rows: abc.Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows of one token and the longer rows of a step, in the order in which they are laid out.

    Both are in descending order of length.
    """
    single = sorted((row for row in rows if row.stop - row.start == 1), key=lambda row: -row.stop)
    longer = sorted((row for row in rows if row.stop - row.start > 1), key=lambda row: -row.stop)
    return single, longer


def make_plan(
    rows: abc.Sequence[Row], cache: PagedKvCache, device: torch.device, group: int | None = 0
) -> AttentionMetadata:
    """Lay out the checked `rows` of a step as one flat batch.

    `cache`: cache of keys and values. `group`: index of its KV group, or None if no layer has attention.
    """
    size = cache.group.page_tokens
    single, longer = divide_rows(rows)
    laid = single + longer
    lengths = [cache.group.pages_for(row.stop) for row in laid]
    page_tables = [
        [0] * length if group is None else row.tables[group]
        for row, length in zip(laid, lengths, strict=True)
    ]

    tokens = list(chain.from_iterable(row.sequence.tokens(row.start, row.stop) for row in laid))
    positions = list(chain.from_iterable(range(row.start, row.stop) for row in laid))
    pages_of_tokens = [
        table[each // size]
        for row, table in zip(laid, page_tables, strict=True)
        for each in range(row.start, row.stop)
    ]
    begins = [0]
    for row in laid:
        begins.append(begins[-1] + row.stop - row.start)
    offsets = {id(row): begin - row.start for row, begin in zip(laid, begins, strict=False)}
    keep = [offsets[id(row)] + each for row in rows for each in row.wanted]

    reads = _reads(laid, page_tables, len(single), lengths, size)
    packed = integers([*tokens, *positions, *pages_of_tokens, *keep, *chain(*(each.table for each in reads))])
    sizes = [len(tokens)] * 3 + [len(keep)] + [len(each.table) for each in reads]
    ids, where, pages, wanted, *tables = torch.split(packed.to(device), sizes)

    groups: list[DecodeGroup] = []
    continued: list[ContinuedRow] = []
    for read, table in zip(reads, tables, strict=True):
        begin, end = begins[read.first], begins[read.end]
        if read.end <= len(single):
            groups.append(_decode_group(begin, end, table, where, cache))
        else:
            continued.append(_continued_row(begin, end, table, laid[read.first].stop, where, cache))
    return AttentionMetadata(
        tokens=ids[None],
        positions=where[None],
        write=_write_rows(pages, where, cache),
        groups=tuple(groups),
        only_group=groups[0] if groups and groups[0].end == len(tokens) else None,
        continued=tuple(continued),
        firsts=_first_rows(laid, begins, where, cache),
        keep=wanted,
    )


def _first_rows(
    laid: abc.Sequence[Row], begins: abc.Sequence[int], positions: torch.Tensor, cache: PagedKvCache
) -> tuple[FirstRow, ...]:
    """Return the layout of the rows of several tokens that start at position 0.

    `laid`: all rows of the step. `begins`: index of the first token of each in the flat batch.
    """
    return tuple(
        FirstRow(begin, end, _masks(begin, end, row.stop, positions, cache))
        for row, (begin, end) in zip(laid, pairwise(begins), strict=True)
        if row.start == 0 and end - begin > 1
    )


def groups_of_similar_length(pages: abc.Sequence[int]) -> list[int]:
    """Divide a descending list of page counts into groups, and return the index at which each group ends.

    A group is padded to its longest row. It ends where padding costs more than another group's calls.
    """
    ends: list[int] = []
    longest = padding = 0
    for index, count in enumerate(pages):
        padding += longest - count
        if index == 0 or padding > PADDING_MAX:
            if index:
                ends.append(index)
            longest, padding = count, 0
    return [*ends, len(pages)] if pages else []


def attention_mask(
    positions: torch.Tensor, width: int, like: torch.Tensor, span: AttentionSpan | None = None
) -> torch.Tensor:
    """Return a mask [positions, width] in the dtype of `like`: 0 for visible keys, -inf for others.

    `positions`: positions of the queries. `width`: number of key positions. `span`: if given, it hides
    earlier keys.
    """
    hidden = torch.arange(width, device=positions.device) > positions[:, None]
    if span is not None:
        hidden |= span.hidden(positions, 0, width)
    return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


class _Read(NamedTuple):
    """One copy of pages that attention reads in each layer: those of the rows [first, end), which all have
    the same number of pages. `table`: their page tables."""

    first: int
    end: int
    table: list[int]


def _reads(
    laid: abc.Sequence[Row],
    page_tables: abc.Sequence[abc.Sequence[int]],
    single_count: int,
    lengths: list[int],
    size: int,
) -> list[_Read]:
    """Return the copies of pages that attention reads in a step.

    `laid`: the step's rows in the order of the batch. The first `single_count` have one token each.
    `page_tables`: page tables of the rows. `lengths`: pages of each row.
    """
    reads: list[_Read] = []
    first = 0
    for end in groups_of_similar_length(lengths[:single_count]):
        reads.append(
            _Read(first, end, _page_table(laid[first:end], page_tables[first:end], lengths[first], size))
        )
        first = end
    reads.extend(
        _Read(index, index + 1, _page_table([laid[index]], [page_tables[index]], lengths[index], size))
        for index in range(single_count, len(laid))
        if laid[index].start > 0
    )
    return reads


def _page_table(
    rows: abc.Sequence[Row], page_tables: abc.Sequence[abc.Sequence[int]], pages: int, page_tokens: int
) -> list[int]:
    """Return the rows' page tables, one after the other, with `pages` entries each.

    A shorter table is filled up with its own first page. The contents of that page are finite numbers, and a
    mask hides them.
    """
    table: list[int] = []
    for row, own in zip(rows, page_tables, strict=True):
        used = -(-row.stop // page_tokens)
        table.extend(own[:used])
        table.extend([own[0]] * (pages - used))
    return table


def _write_rows(pages: torch.Tensor, positions: torch.Tensor, cache: PagedKvCache) -> torch.Tensor:
    size = cache.group.page_tokens
    heads = torch.arange(len(cache.group.heads), device=pages.device) * cache.rows_per_head
    entries = torch.cat([heads + plane * size for plane in range(cache.planes)])
    return ((pages * cache.rows_per_page + positions % size)[:, None] + entries).flatten()


def _decode_group(
    begin: int, end: int, pages: torch.Tensor, positions: torch.Tensor, cache: PagedKvCache
) -> DecodeGroup:
    heads = len(cache.group.heads)
    width = len(pages) // (end - begin) * cache.group.page_tokens
    own, like = positions[begin:end], cache.tensor
    masks = AttentionMasks(
        lambda span: attention_mask(own, width, like, span).repeat(heads, 1)[:, None], width
    )
    buffer, keys, values = _read_buffer(pages, heads * (end - begin), cache)
    return DecodeGroup(begin, end, pages, buffer, keys, values, masks)


def _continued_row(
    begin: int, end: int, pages: torch.Tensor, stop: int, positions: torch.Tensor, cache: PagedKvCache
) -> ContinuedRow:
    """Return the layout of a row with the tokens [begin, end) of the flat batch, whose earlier tokens are in
    `pages`.

    `stop`: position in the sequence at which the row ends.
    """
    buffer, keys, values = _read_buffer(pages, len(cache.group.heads), cache)
    masks = _masks(begin, end, stop, positions, cache)
    return ContinuedRow(begin, end, pages, buffer, keys[:, :stop], values[:, :stop], masks)


def _masks(begin: int, end: int, stop: int, positions: torch.Tensor, cache: PagedKvCache) -> AttentionMasks:
    """Return the attention masks of tokens [begin, end) of the flat batch over all keys before position
    `stop`."""
    own, like = positions[begin:end], cache.tensor
    return AttentionMasks(lambda span: attention_mask(own, stop, like, span), stop)


def _read_buffer(
    pages: torch.Tensor, matrices: int, cache: PagedKvCache
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an empty buffer for the contents of `pages`, and views of the keys and of the values in it.

    The cache's `read` fills the buffer. Each view has the shape of `matrices` matrices.
    """
    entries = cache.group.page_tokens * cache.head_dim
    buffer = cache.tensor.new_empty(cache.planes, len(cache.group.heads), len(pages), entries)
    vectors = buffer.view(cache.planes, matrices, -1, cache.head_dim)
    return buffer.permute(2, 1, 0, 3), vectors[0], vectors[-1]


def integers(values: list[int]) -> torch.Tensor:
    """Return `values`, a list that is not empty, as an int64 tensor on the CPU.

    Takes an eighth of the time of `torch.tensor`.
    """
    return torch.frombuffer(array("q", values), dtype=torch.int64)
