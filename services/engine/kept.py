"""Which keys and values does the next step find side by side already?

Tokens that decode together fetch their pages, which lie anywhere, into one place, layer by layer. From one
step to the next little of that changes: each sequence has one token more. While the same sequences decode,
what was fetched is kept, and a step adds what is new. The pages have everything all the same, and are the
only truth: what is kept is fetched anew whenever other sequences decode, a sequence has outgrown its place,
or a step has failed.
"""

from collections import abc
from dataclasses import dataclass
from typing import Final

import torch

from services.engine.kv_cache import PagedKvCache
from services.engine.rows import Row, Sequence

ROOM_PAGES: Final = 2
"""By how many pages a sequence may grow before what is kept of it is fetched anew."""


@dataclass(slots=True)
class KeptGroup:
    """B rows of one token each that attend together, as `services.engine.plan.Group`."""

    begin: int
    end: int
    pages: torch.Tensor | None
    """Fetched in this step, of one row after the other, equally many; None: they are there."""
    new: torch.Tensor
    """[B * 2 * kv heads]: where the step's entries go, token by token, keys first."""
    rooms: list[torch.Tensor]
    """Of each layer, [2 * kv heads * B * S, head_dim]."""
    matrices: list[tuple[torch.Tensor, torch.Tensor]]
    """Of each layer, keys and values there, [kv heads * B, S, head_dim]."""
    mask: torch.Tensor
    """[kv heads * B, 1, S]: 0 where a token may look, -inf elsewhere."""
    base: torch.Tensor
    """[B, 2 * kv heads]: `new`, for position 0."""
    tokens: int
    """S"""

    def look_up(
        self, cache: PagedKvCache, place: int, layer: int, entries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv heads * B, S, head_dim] of the `place`-th layer of the cache, which has the id
        `layer`; `entries` [B * 2 * kv heads, head_dim] are the step's own."""
        if self.pages is None:
            self.rooms[place].index_copy_(0, self.new, entries)
        else:
            pages = self.rooms[place].view(2, len(cache.layout.kv_heads), len(self.pages), -1)
            cache.read(layer, self.pages, pages.permute(2, 1, 0, 3))
        return self.matrices[place]

    def step_to(self, positions: torch.Tensor) -> None:
        """The same rows, at their next `positions` [B]."""
        self.pages = None
        self.new = (self.base + positions[:, None]).flatten()
        heads = len(self.mask) // len(positions)
        rows = torch.arange(len(self.mask), device=positions.device) * self.tokens
        self.mask.view(-1).index_fill_(0, rows + positions.repeat(heads), 0)


class Kept:
    """Of one cache, on a CPU, in `length` bytes. The sequences of the last step are known until the next one.
    One step at a time, of which it is told how it `ended`."""

    def __init__(self, cache: PagedKvCache, length: int) -> None:
        self._cache = cache
        self._memory = cache.tensor.new_empty(length // cache.tensor.element_size())
        self._taken = 0
        """Of it, in elements."""
        self._groups: list[KeptGroup] = []
        self._cuts: list[int] = []
        self._sequences: list[Sequence] = []
        self._stops: list[int] = []
        self._there = False
        """What `_groups` say is kept, for rows that go on from `_stops`."""
        self._changing = False
        """By the step that runs."""

    def knows(self, rows: abc.Sequence[Row], cuts: abc.Sequence[int]) -> bool:
        """Whether these rows of one token each, that attend together in groups which end at `cuts`, go on
        from the last step's, and have space."""
        return (
            self._there
            and len(rows) == len(self._sequences)
            and all(
                row.sequence is sequence and row.start == stop
                for row, sequence, stop in zip(rows, self._sequences, self._stops, strict=True)
            )
            and [*cuts] == self._cuts
            and all(rows[group.begin].stop <= group.tokens for group in self._groups)
        )

    def go_on(self, rows: abc.Sequence[Row], positions: torch.Tensor) -> list[KeptGroup]:
        """Of rows that it knows: the groups, a token further."""
        self._there, self._changing = False, True
        self._stops = [row.stop for row in rows]
        for group in self._groups:
            group.step_to(positions[group.begin : group.end])
        return self._groups

    def fits(self, pages: int) -> bool:
        """Whether so many pages may be kept."""
        return pages * self._cache.layout.page_bytes <= self._memory.nbytes

    def begin(self, rows: abc.Sequence[Row], cuts: abc.Sequence[int]) -> None:
        """Keep these rows from now on; their groups are `add`ed, in order."""
        self._there, self._changing = False, True
        self._groups, self._taken = [], 0
        self._sequences, self._stops = [row.sequence for row in rows], [row.stop for row in rows]
        self._cuts = [*cuts]

    def add(
        self, begin: int, end: int, pages: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> KeptGroup:
        """A group that is fetched in this step, from `pages`; `mask` as the group has it."""
        layout = self._cache.layout
        heads, count = len(layout.kv_heads), end - begin
        tokens = mask.shape[-1]
        shape = (len(layout.layers), 2, heads * count, tokens, layout.head_dim)
        start, size = self._taken, torch.Size(shape).numel()
        self._taken += size
        layers = self._memory[start : start + size].view(shape)
        matrices = [(keys, values) for keys, values in layers]
        rooms = [*layers.view(len(layers), -1, layout.head_dim)]
        kinds = torch.arange(2 * heads, device=positions.device) * (count * tokens)
        base = torch.arange(count, device=positions.device)[:, None] * tokens + kinds
        new = (base + positions[:, None]).flatten()
        group = KeptGroup(begin, end, pages, new, rooms, matrices, mask, base, tokens)
        self._groups.append(group)
        return group

    def ended(self, *, well: bool) -> None:
        """The step has ended: what it fetched or added is there, or nobody knows what is."""
        if self._changing:
            self._there = well
        self._changing = False
