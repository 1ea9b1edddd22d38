"""Computation of the checksum of a sequence's KV pages, one number for each KV head.

It is the sum that `services/pages/kv_checksum.py` defines, computed on the device of the pages. Only the
numbers leave the device. It is exact on every device, because it adds integers modulo 2**64.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, Protocol

import torch

from baton.pages.kv_checksum import GAMMA, MIX, WORD, lane, multiplier, word_bytes
from baton.pages.layout import PLAIN, KvGroup, KvPlane

BYTES_AT_A_TIME: Final = 4 * 2**20
"""Most bytes of pages that are read at once, unless one layer of a page has more.

Intermediate results take four times as much memory.
"""

_WORDS: Final = {2: torch.int16, 4: torch.int32}


class Pages(Protocol):
    """Attributes of `baton.inference.kv_memory.KvCache` that a page checksum reads."""

    @property
    def group(self) -> KvGroup: ...

    @property
    def tensor(self) -> torch.Tensor:
        """All pages as one tensor: [page][kv head][layer][plane][token][elements]."""


class PageSummer:
    """Computes checksums of the KV pages of sequences, from the tensor of all pages in `pages`."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._group = group = summed_group(pages.group)
        self._page_tokens = pages.group.page_tokens // group.page_tokens
        """Number of tokens that the checksum treats as one position: 1, or a page's tokens if it is treated
        as a whole."""
        device = pages.tensor.device
        (vector_bytes,) = set(map(group.vector_bytes, group.planes))
        width = word_bytes(vector_bytes)
        self._word = _WORDS[width]
        self._multipliers = _tensor([multiplier(each) for each in range(vector_bytes // width)], device)
        planes = range(len(group.planes))
        lanes = [lane(layer, plane, head) for layer, head in group.places() for plane in planes]
        self._lanes = _tensor(lanes, device).view(len(group.heads), len(group.layers), len(planes), 1)

    def total(self, table: Sequence[int], start: int, stop: int) -> int:
        """Return the checksum of token positions [start, stop) over all KV heads on this rank.

        `table`: the sequence's page indices, from position 0 on.
        """
        return sum(self.by_head(table, start, stop).values()) & WORD

    def by_head(self, table: Sequence[int], start: int, stop: int) -> dict[int, int]:
        """Return the checksum of the KV at token positions [start, stop), by the id of each KV head on this
        rank.

        `table`: the sequence's page indices, from position 0 on. A page in an engine's own encoding, or of a
        state, cannot be divided. It counts as a whole if its first position is in [start, stop).
        """
        heads = self._group.heads
        start, stop = -(-start // self._page_tokens), -(-stop // self._page_tokens)
        totals = torch.zeros(len(heads), dtype=torch.int64, device=self._lanes.device)
        for first, pages, layers in self.pieces(table, start, stop):
            totals += self._sum(first, pages, layers, start, stop)
        return {head: total & WORD for head, total in zip(heads, totals.tolist(), strict=True)}

    def pieces(
        self, table: Sequence[int], start: int, stop: int
    ) -> Iterator[tuple[int, Sequence[int], slice]]:
        """Yield the pieces of pages that are read one after the other to cover positions [start, stop).

        Each piece is (position of its first page, page indices, slice of layers). Positions are those of
        `summed_group`.
        """
        group = self._group
        size, layer_count = group.page_tokens, len(group.layers)
        if not layer_count:
            return
        pages_each = max(BYTES_AT_A_TIME // group.page_bytes, 1)
        layers_each = max(BYTES_AT_A_TIME * layer_count // group.page_bytes, 1)
        ends = group.pages_for(stop) if start < stop else 0
        for page in range(start // size, ends, pages_each):
            for layer in range(0, layer_count, layers_each):
                yield (
                    page * size,
                    table[page : min(page + pages_each, ends)],
                    slice(layer, layer + layers_each),
                )

    def _sum(self, first: int, pages: Sequence[int], layers: slice, start: int, stop: int) -> torch.Tensor:
        device, size = self._lanes.device, self._group.page_tokens
        tensor = self._pages.tensor
        if self._group is not self._pages.group:
            tensor = tensor.flatten(3)[:, :, :, None, None]
        read = tensor.view(self._word)[:, :, layers]
        words = read.index_select(0, torch.tensor(pages, device=device)).to(torch.int64)
        vectors = words.mul_(self._multipliers).sum(-1)
        positions = torch.arange(first, first + len(pages) * size, device=device).view(-1, 1, 1, 1, size)
        keys = _mix(self._lanes[:, layers] + positions * _signed(GAMMA))
        counts = (positions >= start) & (positions < stop)
        return (_mix(vectors.add_(keys)) * counts).sum(dim=(0, 2, 3, 4))


def summed_group(group: KvGroup) -> KvGroup:
    """Return `group` with the page layout that the checksum uses.

    A page in an engine's own encoding, or of a state, is treated as one position with one vector of bytes.
    Other groups are returned unchanged.
    """
    if group.encoding == PLAIN and not group.is_state:
        return group
    elements = group.page_positions * sum(plane.elements for plane in group.planes)
    return replace(group, page_tokens=1, planes=(KvPlane(group.encoding, elements),))


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Apply `baton.pages.kv_checksum.mix` to each value, in place."""
    values.bitwise_xor_(_shifted(values, 30)).mul_(_signed(MIX[0]))
    values.bitwise_xor_(_shifted(values, 27)).mul_(_signed(MIX[1]))
    return values.bitwise_xor_(_shifted(values, 31))


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return `values` shifted to the right by `bits`, filled with zeros. torch would fill in the sign bit."""
    return (values >> bits).bitwise_and_(WORD >> bits)


def _tensor(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([_signed(each) for each in values], dtype=torch.int64, device=device)


def _signed(value: int) -> int:
    """Return the signed 64-bit number with the same bits as `value`, since torch cannot add unsigned ones."""
    return value - 2**64 if value >= 2**63 else value
