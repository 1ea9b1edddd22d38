"""Which token of a step is read and written where?

A step's rows become one flat batch: first the rows of a single token, in groups of similar length
that are computed together; then the longer rows one by one. Where a kernel looks at pages where they lie,
there are two groups of any lengths, the rows of a single token and the longer ones. Every index tensor is
made here, once a step, and serves all layers.
"""

from array import array
from collections import abc
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from baton.engine.execution.kept import DecodeWorkspace, WorkspaceGroup
from baton.engine.execution.paged_rows import PagedKernel, PagedRows, pack, page_table, unpack
from baton.engine.execution.row_groups import Masks, groups_of_similar_length, mask
from baton.engine.kv_cache import PagedKvCache
from baton.engine_interface import Row
from baton.sampling.draft_rows import SpeculatedSequence


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one token each that attend together: B of them."""

    begin: int
    end: int
    """Their tokens in the flat batch are [begin, end)."""
    pages: torch.Tensor
    """Of one row after the other, equally many: what the cache's `read` copies."""
    room: torch.Tensor
    """What it copies into, for layer after layer; `keys` and `values` look at it."""
    keys: torch.Tensor
    """[kv heads * B, S, head_dim], where S is all of the pages' tokens."""
    values: torch.Tensor
    """As `keys`."""
    masks: Masks
    """Added to the scores: 0 where a token may look, -inf elsewhere. [kv heads * B, 1, S]"""

    def look_up(
        self, cache: PagedKvCache, place: int, layer: int, entries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `WorkspaceGroup.look_up`: everything is fetched."""
        del place, entries
        cache.read(layer, self.pages, self.room)
        return self.keys.transpose(1, 2), self.values

    def fold(self, query: torch.Tensor) -> torch.Tensor:
        """[B, query heads, head_dim] as [kv heads * B, query heads of each, head_dim]."""
        rows, _, head_dim = query.shape
        folded = query.view(rows, len(self.keys) // rows, -1, head_dim)
        return folded.transpose(0, 1).reshape(len(self.keys), -1, head_dim)

    def unfold(self, seen: torch.Tensor) -> torch.Tensor:
        """The other way round."""
        rows, head_dim = self.end - self.begin, seen.shape[2]
        return seen.view(len(self.keys) // rows, rows, -1, head_dim).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class ContinuedRow:
    """A row of several tokens, of which others lie in its pages already."""

    begin: int
    end: int
    pages: torch.Tensor
    room: torch.Tensor
    keys: torch.Tensor
    """[kv heads, S, head_dim], of all tokens up to the row's last."""
    values: torch.Tensor
    masks: Masks
    """As a group's, [tokens, S]: not asked for on a CPU, which looks in blocks and makes what those need."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A row that starts at position 0: its tokens look at each other, and nothing is read."""

    begin: int
    end: int
    masks: Masks
    """As of a row with others before it, where its tokens do not see all of each other."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step. T tokens, of which N have wanted logits."""

    tokens: torch.Tensor
    """[1, T] ids."""
    positions: torch.Tensor
    """[1, T]"""
    write: torch.Tensor
    """[T * planes * kv heads]: what the cache's `write` takes, token by token, keys first."""
    groups: tuple[DecodeGroup | WorkspaceGroup | PagedRows, ...]
    alike: DecodeGroup | WorkspaceGroup | PagedRows | None
    """The only group, where the step has no other rows."""
    prefixed: tuple[ContinuedRow, ...]
    wholes: tuple[Whole, ...]
    keep: torch.Tensor
    """[N] places in the flat batch whose logits are wanted, in the order of the step's rows, and of each in
    that of its positions."""


def make_plan(
    rows: abc.Sequence[Row],
    cache: PagedKvCache,
    device: torch.device,
    kept: DecodeWorkspace | None = None,
    kernel: PagedKernel | None = None,
) -> AttentionMetadata:
    """Lay the checked `rows` of a step out. Moves to `device` what it needs, in one copy. `kept`: of the last
    steps, and from now on of this one, once it has `ended`; not with a `kernel`, which is to look at all."""
    size = cache.group.page_tokens
    single = [row for row in rows if row.stop - row.start == 1]
    going_on = [row for row in single if not isinstance(row.sequence, SpeculatedSequence)]
    arranged = None if kept is None or not going_on else kept.arrange(going_on)
    groups, laid = arranged or ([], [])
    staying = len(laid)
    anew = [row for row in single if isinstance(row.sequence, SpeculatedSequence)] if arranged else single
    laid += sorted(anew, key=lambda row: -row.stop)
    laid += sorted((row for row in rows if row.stop - row.start > 1), key=lambda row: -row.stop)
    lengths = [cache.group.pages_for(row.stop) for row in laid]

    tokens = list(chain.from_iterable(row.sequence.tokens(row.start, row.stop) for row in laid))
    positions = list(chain.from_iterable(range(row.start, row.stop) for row in laid))
    homes = [row.pages[place // size] for row in laid for place in range(row.start, row.stop)]
    begins = [0]
    for row in laid:
        begins.append(begins[-1] + row.stop - row.start)
    places = {id(row): begin - row.start for row, begin in zip(laid, begins, strict=False)}
    keep = [places[id(row)] + each for row in rows for each in row.wanted]

    if kernel is not None:
        reads = _paged_reads(laid, len(single), size)
    else:
        cuts = groups_of_similar_length(lengths[staying : len(single)])
        reads = _reads(laid, staying, len(single), lengths, cuts, size)
    packed = integers([*tokens, *positions, *homes, *keep, *chain(*(read.table for read in reads))])
    sizes = [len(tokens)] * 3 + [len(keep)] + [len(read.table) for read in reads]
    ids, where, pages, wanted, *tables = torch.split(packed.to(device), sizes)

    together: list[DecodeGroup | WorkspaceGroup | PagedRows] = []
    prefixed: list[ContinuedRow] = []
    for group in groups:
        begin = together[-1].end if together else 0
        group.lay(begin, where[begin : begin + len(group)])
        together.append(group)
    for read, table in zip(reads, tables, strict=True):
        begin, end = begins[read.first], begins[read.end]
        if kernel is not None:
            together.append(unpack(table, laid[read.first : read.end], begin, end, kernel))
        elif read.end <= len(single):
            together.append(_singles(begin, end, table, where, cache))
        else:
            prefixed.append(_prefixed(begin, end, table, laid[read.first].stop, where, cache))
    wholes = [
        Whole(
            begins[place],
            begins[place + 1],
            _masks(begins[place], begins[place + 1], laid[place].stop, where, cache),
        )
        for place in range(len(single), len(laid))
        if laid[place].start == 0 and kernel is None
    ]
    return AttentionMetadata(
        tokens=ids[None],
        positions=where[None],
        write=_write_rows(pages, where, cache),
        groups=tuple(together),
        alike=together[0] if together and together[0].end == len(tokens) else None,
        prefixed=tuple(prefixed),
        wholes=tuple(wholes),
        keep=wanted,
    )


def pack_singles(rows: abc.Sequence[Row], pages: int, page_tokens: int) -> list[int]:
    """What `plan_of_singles` takes, of rows of one token each that have up to `pages` pages."""
    tokens = chain.from_iterable(row.sequence.tokens(row.start, row.stop) for row in rows)
    homes = (row.pages[row.start // page_tokens] for row in rows)
    return [*tokens, *(row.start for row in rows), *homes, *page_table(rows, pages, page_tokens)]


def plan_of_singles(
    packed: torch.Tensor, rows: int, cache: PagedKvCache, kernel: PagedKernel | None = None
) -> AttentionMetadata:
    """`rows` rows of one token each as one group, in their order, all wanted: from what `pack_singles` laid
    side by side, which is on the device. Makes the same calls whatever the numbers are."""
    ids, where, homes, table = torch.split(packed, [rows, rows, rows, len(packed) - 3 * rows])
    group: DecodeGroup | PagedRows
    if kernel is None:
        group = _singles(0, rows, table, where, cache)
    else:
        begins = torch.arange(rows + 1, dtype=torch.int32, device=packed.device)
        stops, tables = (where + 1).int(), table.view(rows, -1).int()
        group = PagedRows(0, rows, begins, stops, tables, longest=1, kernel=kernel)
    return AttentionMetadata(
        tokens=ids[None],
        positions=where[None],
        write=_write_rows(homes, where, cache),
        groups=(group,),
        alike=group,
        prefixed=(),
        wholes=(),
        keep=torch.arange(rows, device=packed.device),
    )


class _Read(NamedTuple):
    """The rows [first, end) of the laid-out step read together, from these pages, equally many a row."""

    first: int
    end: int
    table: list[int]


def _reads(
    laid: abc.Sequence[Row], staying: int, single_count: int, lengths: list[int], cuts: list[int], size: int
) -> list[_Read]:
    """Of the rows behind the first `staying`. `cuts`: where groups of those of one token end, counted from
    there; rows of one token are `single_count` in all."""
    reads: list[_Read] = []
    first = staying
    for end in (staying + cut for cut in cuts):
        reads.append(_Read(first, end, page_table(laid[first:end], lengths[first], size)))
        first = end
    reads.extend(
        _Read(place, place + 1, page_table([laid[place]], lengths[place], size))
        for place in range(single_count, len(laid))
        if laid[place].start > 0
    )
    return reads


def _paged_reads(laid: abc.Sequence[Row], single_count: int, size: int) -> list[_Read]:
    """Those of one token together, and the longer ones."""
    spans = [span for span in ((0, single_count), (single_count, len(laid))) if span[0] < span[1]]
    return [_Read(*span, pack(laid[slice(*span)], size)) for span in spans]


def _write_rows(pages: torch.Tensor, positions: torch.Tensor, cache: PagedKvCache) -> torch.Tensor:
    size = cache.group.page_tokens
    heads = torch.arange(len(cache.group.heads), device=pages.device) * cache.rows_per_head
    entries = torch.cat([heads + plane * size for plane in range(cache.planes)])
    return ((pages * cache.rows_per_page + positions % size)[:, None] + entries).flatten()


def _singles(
    begin: int,
    end: int,
    pages: torch.Tensor,
    positions: torch.Tensor,
    cache: PagedKvCache,
) -> DecodeGroup:
    heads = len(cache.group.heads)
    width = len(pages) // (end - begin) * cache.group.page_tokens
    own, like = positions[begin:end], cache.tensor
    masks = Masks(lambda reach: mask(own, width, like, reach).repeat(heads, 1)[:, None], width)
    room, keys, values = _room(pages, heads * (end - begin), cache)
    return DecodeGroup(begin, end, pages, room, keys, values, masks)


def _prefixed(
    begin: int, end: int, pages: torch.Tensor, stop: int, positions: torch.Tensor, cache: PagedKvCache
) -> ContinuedRow:
    """Of a row that ends at position `stop`."""
    room, keys, values = _room(pages, len(cache.group.heads), cache)
    masks = _masks(begin, end, stop, positions, cache)
    return ContinuedRow(begin, end, pages, room, keys[:, :stop], values[:, :stop], masks)


def _masks(begin: int, end: int, stop: int, positions: torch.Tensor, cache: PagedKvCache) -> Masks:
    """Of the tokens [begin, end) of the flat batch over all before position `stop`."""
    own, like = positions[begin:end], cache.tensor
    return Masks(lambda reach: mask(own, stop, like, reach), stop)


def _room(
    pages: torch.Tensor, matrices: int, cache: PagedKvCache
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the cache's `read` may copy `pages` to, and the matrices of keys and of values it becomes."""
    entries = cache.group.page_tokens * cache.head_dim
    room = cache.tensor.new_empty(cache.planes, len(cache.group.heads), len(pages), entries)
    keys, values = room.view(cache.planes, matrices, -1, cache.head_dim)
    return room.permute(2, 1, 0, 3), keys, values


def integers(values: list[int]) -> torch.Tensor:
    """`values`, at least one, as int64 on the CPU: an eighth of the time that torch takes to read a list."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)
