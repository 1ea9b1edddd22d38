"""Which keys and values does the next step find side by side already?

Tokens that decode together need their sequences' keys and values side by side, and the pages lie anywhere.
What a step fetched stays where it is: each sequence has a slot in the block of its group, and a step adds its
own entries there. One that comes is fetched alone; where one goes, the last of its group takes its slot. The
pages have everything all the same, and are the only truth: all is fetched anew when the slots are too few or
too short, or when a step has failed.
"""

from collections import abc
from typing import Final

import torch

from baton.engine.execution.row_groups import Masks, alike, groups_of_similar_length, mask
from baton.engine.kv_cache import PagedKvCache
from baton.engine_interface import Row, Sequence
from baton.pages.layout import KvGroup

ROOM_PAGES: Final = 4
"""By how many pages the longest of a group may grow in its slot; where memory is short, by `FEW_PAGES`. All
of a slot is looked at: torch would copy matrices that are a part of it."""
FEW_PAGES: Final = 2
MORE_SLOTS: Final = 4
"""Of a group, for sequences that come, where there is memory. A slot that nobody has had takes none."""


class WorkspaceGroup:
    """Sequences of similar length that attend together, one token each. As `baton.engine.execution.step_plan.DecodeGroup`,
    with the matrices of a sequence side by side."""

    def __init__(self, block: torch.Tensor, kv: KvGroup) -> None:
        """`kv`: the layers. `block`: [layers, planes, slots, kv heads, tokens, head_dim], keys before values;
        whatever it holds."""
        self._block = block
        self._kv = kv
        self._layers = [*block]
        self._entries = [layer.view(-1, block.shape[5]) for layer in block]
        self.tokens: int = block.shape[4]
        """Of a slot."""
        self.sequences: list[Sequence] = []
        self._stops: list[int] = []
        """How many tokens of each slot are there, once the step has ended."""
        self._arrived: list[tuple[int, torch.Tensor]] = []
        """Slots that are fetched in this step, and from which pages."""
        self._matrices: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Of each layer."""
        self.begin = self.end = 0
        """Their tokens in the step's flat batch are [begin, end), in the order of the slots."""
        self._rows = 0
        """Matrices of the step: B * kv heads."""
        self._new = block.new_empty(0)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lengths(self) -> list[int]:
        """Pages of each slot."""
        return [self._kv.pages_for(stop) for stop in self._stops]

    def retain(self, coming: abc.Mapping[Sequence, Row]) -> None:
        """Keep the sequences that go on in `coming` from where they are, and have space; a slot that falls
        free is the last one's from now on."""
        self._arrived = []
        for slot in reversed(range(len(self.sequences))):
            row = coming.get(self.sequences[slot])
            if row is None or row.start != self._stops[slot] or row.stop > self.tokens:
                self._vacate(slot)
        self._stops = [coming[sequence].stop for sequence in self.sequences]

    def takes(self, row: Row) -> bool:
        """Whether there is a slot for this row's sequence, among others of similar length."""
        free = len(self.sequences) < self._block.shape[2] and row.stop <= self.tokens
        return free and alike([*self.lengths, self._kv.pages_for(row.stop)])

    def add(self, row: Row) -> None:
        """Give the row's sequence the next slot: this step fetches it."""
        slot, count = len(self.sequences), self._kv.pages_for(row.stop)
        self._arrived.append((slot, torch.tensor(row.pages[:count])))
        # What a mask hides is multiplied by zero, and has to be a number.
        self._block[:, :, slot, :, count * self._kv.page_tokens :] = 0
        self.sequences.append(row.sequence)
        self._stops.append(row.stop)

    def lay(self, begin: int, positions: torch.Tensor) -> None:
        """The sequences' tokens are at `positions` [B], and from `begin` on in the flat batch."""
        count, heads = len(positions), self._block.shape[3]
        self.begin, self.end = begin, begin + count
        rows, tokens, block = positions.repeat_interleave(heads), self.tokens, self._block
        self._rows = len(rows)
        self.masks = Masks(lambda reach: mask(rows, tokens, block, reach)[:, None], tokens)
        """[B * kv heads, 1, S]: 0 where a token may look, -inf elsewhere."""
        kinds = torch.arange(block.shape[1])[:, None] * block.shape[2] + torch.arange(count)[:, None, None]
        self._new = ((kinds * heads + torch.arange(heads)) * self.tokens + positions[:, None, None]).flatten()
        """[B * planes * kv heads]: where the step's entries go, token by token, keys first."""
        if not self._matrices or len(self._matrices[0][0]) != self._rows:
            pairs = (layer[:, :count].flatten(1, 2) for layer in self._layers)
            self._matrices = [(keys.transpose(1, 2), values) for keys, values in pairs]

    def look_up(
        self, cache: PagedKvCache, place: int, layer: int, entries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B * kv heads, head_dim, S] and values [B * kv heads, S, head_dim] of the `place`-th layer of
        the cache, which has the id `layer`; `entries` [B * planes * kv heads, head_dim] are the step's
        own."""
        for slot, pages in self._arrived:
            self._fetch(cache, place, layer, slot, pages)
        self._entries[place].index_copy_(0, self._new, entries)
        return self._matrices[place]

    def fold(self, query: torch.Tensor) -> torch.Tensor:
        """[B, query heads, head_dim] as [B * kv heads, query heads of each, head_dim]."""
        return query.reshape(self._rows, -1, query.shape[2])

    def unfold(self, seen: torch.Tensor) -> torch.Tensor:
        """The other way round."""
        return seen.view(self.end - self.begin, -1, seen.shape[2])

    def _fetch(self, cache: PagedKvCache, place: int, layer: int, slot: int, pages: torch.Tensor) -> None:
        there = self._layers[place][:, slot, :, : len(pages) * self._kv.page_tokens]
        # [pages, kv heads, planes, page_tokens * head_dim]
        cache.read(layer, pages, there.unflatten(2, (len(pages), -1)).flatten(3).permute(2, 1, 0, 3))

    def _vacate(self, slot: int) -> None:
        left = self._stops[slot]
        sequence, stop = self.sequences.pop(), self._stops.pop()
        last = len(self.sequences)
        if slot < last:
            self._block[:, :, slot, :, :stop] = self._block[:, :, last, :, :stop]
            # As in `add`: what one leaves behind may be no numbers, by which its step failed.
            self._block[:, :, slot, :, stop:left] = 0
            self.sequences[slot], self._stops[slot] = sequence, stop


class DecodeWorkspace:
    """Of one cache, on a CPU, in `length` bytes. One step at a time, of which it is told how it `ended`."""

    def __init__(self, cache: PagedKvCache, length: int) -> None:
        self._cache = cache
        self._memory = cache.tensor.new_empty(length // cache.tensor.element_size())
        self._groups: list[WorkspaceGroup] = []
        self._there = True
        """What `_groups` say is kept."""
        self._changing = False
        """By the step that runs."""

    def arrange(self, rows: abc.Sequence[Row]) -> tuple[list[WorkspaceGroup], list[Row]] | None:
        """Groups for these rows of one token each, and the rows in the order of their slots; None where they
        do not fit. What is not there yet is fetched as the groups are looked up."""
        if not self._there:
            self._groups = []
        self._there, self._changing = False, True
        coming = {row.sequence: row for row in rows}
        for group in self._groups:
            group.retain(coming)
        self._groups = [group for group in self._groups if len(group)]
        stay = {sequence for group in self._groups for sequence in group.sequences}
        for row in rows:
            if row.sequence not in stay and not self._join(row):
                self._rebuild(rows)
                break
        if not self._groups:
            return None
        ordered = [coming[sequence] for group in self._groups for sequence in group.sequences]
        return self._groups, ordered

    def ended(self, *, well: bool) -> None:
        """The step has ended: what it fetched or added is there, or nobody knows what is."""
        if self._changing:
            self._there = well
        self._changing = False

    def _join(self, row: Row) -> bool:
        for group in self._groups:
            if group.takes(row):
                group.add(row)
                return True
        return False

    def _rebuild(self, rows: abc.Sequence[Row]) -> None:
        """Give every row a slot, in groups with space for others; no groups where there is too little memory
        for the rows alone."""
        kv = self._cache.group
        longest_first = sorted(rows, key=lambda row: -row.stop)
        lengths = [kv.pages_for(row.stop) for row in longest_first]
        cuts = groups_of_similar_length(lengths)
        spans = [*zip([0, *cuts], cuts, strict=False)]
        blocks = self._blocks(
            [(end - first + MORE_SLOTS, lengths[first] + ROOM_PAGES) for first, end in spans]
        ) or self._blocks([(end - first, lengths[first] + FEW_PAGES) for first, end in spans])
        self._groups = [WorkspaceGroup(block, kv) for block in blocks]
        for group, (first, end) in zip(self._groups, spans, strict=False):
            for row in longest_first[first:end]:
                group.add(row)

    def _blocks(self, sizes: abc.Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Of the memory, with so many slots of so many pages each; none where it is too little for all."""
        kv, planes, width = self._cache.group, self._cache.planes, self._cache.head_dim
        blocks, end = [], 0
        for slots, pages in sizes:
            tokens = pages * kv.page_tokens
            shape = (len(kv.layers), planes, slots, len(kv.heads), tokens, width)
            begin, end = end, end + torch.Size(shape).numel()
            if end > len(self._memory):
                return []
            blocks.append(self._memory[begin:end].view(shape))
        return blocks
