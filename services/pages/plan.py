"""Which bytes of each sender rank's pages go where in each receiver rank's?

A hand-over is planned once per pair of workers, at connect, and refused there by the field that differs.
Layers and heads are compared by id (`layers-by-id`): every (layer, head) of every receiver rank has exactly
one sender rank, which copies its strips. A strip is one head's K or V of one layer over the positions of a
page. Strips that lie side by side in both pages go as one run, and so do neighbouring pages that go whole:
few large descriptors.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.pages.errors import Truncated
from services.pages.fit import check_fit
from services.pages.layout import DTYPE_BYTES, KvLayout
from services.pages.runs import PageRun, Window


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """From one sender rank to one receiver rank. One of their page sizes is a multiple of the other."""

    source_page_tokens: int
    target_page_tokens: int
    source_page_bytes: int = 0
    target_page_bytes: int = 0
    vector_bytes: int = 0
    """Of one head's K or V of one position."""
    strips: tuple[tuple[int, int], ...] = ()
    """(offset in the source page, offset in the target page) of each strip that this sender copies."""
    blocks: tuple[PageRun, ...] = ()
    """The runs within a page that carry every strip over the smaller page's positions."""

    @property
    def empty(self) -> bool:
        """This sender rank has nothing for that receiver rank."""
        return not self.strips

    @property
    def whole(self) -> bool:
        """Pages go as they are, and neighbours as one run."""
        return self.blocks[0][2] == self.source_page_bytes == self.target_page_bytes

    @property
    def piece_tokens(self) -> int:
        """Of the smaller page, which the larger one holds some of."""
        return min(self.source_page_tokens, self.target_page_tokens)

    def stretch(self, length: int, count: int) -> int:
        """Most positions that make at most `length` bytes and `count` runs, and a piece at least: as many as
        the smaller page has. Not of an empty plan."""
        small = self.piece_tokens
        piece = len(self.strips) * self.vector_bytes * small
        return small * max(1, min(length // piece, count // len(self.blocks)))

    def runs(
        self, source: Sequence[int], target: Sequence[int], first: int, start: int, stop: int
    ) -> list[PageRun]:
        """Runs that carry positions [start, stop) of a room: whole pages of the smaller size.

        `source`: the sender's page table from position 0 on. `target`: the receiver's pages, from position
        `first` on. Raises Truncated when a table does not reach.
        """
        small = self.piece_tokens
        if first % self.target_page_tokens or not 0 <= first <= start:
            raise ValueError(f"positions {start} on, into pages of {self.target_page_tokens} from {first} on")
        if start % small or stop % small:
            raise ValueError(f"positions {start} to {stop} are no whole pages of {small}")
        if self.empty or start >= stop:
            return []
        if stop > len(source) * self.source_page_tokens:
            raise Truncated(f"{stop} positions to send, {len(source)} pages of {self.source_page_tokens}")
        if stop > first + len(target) * self.target_page_tokens:
            raise Truncated(f"{stop} positions to fill, {len(target)} pages from position {first} on")
        begin, end, before = start // small, stop // small, first // small
        if self.whole:
            return _neighbours(
                source[begin:end], target[begin - before : end - before], self.source_page_bytes
            )
        sources = self._places(source, self.source_page_bytes, self.source_page_tokens // small, begin, end)
        targets = self._places(
            target, self.target_page_bytes, self.target_page_tokens // small, begin - before, end - before
        )
        return [
            (at + block_at, to + block_to, length)
            for at, to in zip(sources, targets, strict=True)
            for block_at, block_to, length in self.blocks
        ]

    def _places(self, table: Sequence[int], page_bytes: int, each: int, begin: int, end: int) -> list[int]:
        """Where the pieces [begin, end) of one side begin. A piece is the smaller page's positions, of which
        a page of this side has `each`."""
        if each == 1:
            return [page * page_bytes for page in table[begin:end]]
        small = self.piece_tokens
        piece = small * self.vector_bytes
        return [table[place // each] * page_bytes + place % each * piece for place in range(begin, end)]


@dataclass(frozen=True, slots=True)
class HandoverPlan:
    """From every rank of a sender to every rank of a receiver."""

    plans: tuple[tuple[TransferPlan, ...], ...]
    """By sender rank, then by receiver rank."""

    def between(self, sender: int, receiver: int) -> TransferPlan:
        return self.plans[sender][receiver]


def plan_hand_over(senders: Sequence[KvLayout], receivers: Sequence[KvLayout]) -> HandoverPlan:
    """The plan from a sender's ranks to a receiver's, in rank order. Raises LayoutMismatch by field."""
    check_fit(senders, receivers)
    holders: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for rank, layout in enumerate(senders):
        for place, strip in _strips(layout):
            holders[place].append((rank, strip))
    wanted = [dict(_strips(layout)) for layout in receivers]
    shares: list[list[list[tuple[int, int]]]] = [[[] for _ in receivers] for _ in senders]
    for receiver, strips in enumerate(wanted):
        for place, target_strip in strips.items():
            those = holders[place]
            sender, source_strip = those[receiver % len(those)]  # copies of a head share the work
            shares[sender][receiver] += [(source_strip + half, target_strip + half) for half in (0, 1)]
    return HandoverPlan(
        tuple(
            tuple(_plan(senders[sender], receivers[receiver], share) for receiver, share in enumerate(row))
            for sender, row in enumerate(shares)
        )
    )


def windows(runs: list[PageRun], window_bytes: int) -> list[Window]:
    """Cut runs into puts of at most `window_bytes` each, so that a close waits for one window at most.

    Together the windows carry exactly the runs' bytes, in order. ValueError for a window of no bytes.
    """
    if window_bytes < 1:
        raise ValueError(f"a window of {window_bytes} bytes carries nothing")
    total = sum([length for _, _, length in runs])
    if total <= window_bytes:
        return [(total, runs)] if runs else []
    cut: list[Window] = []
    window: list[PageRun] = []
    room = window_bytes
    for at, to, length in runs:
        while length >= room:
            window.append((at, to, room))
            at, to, length = at + room, to + room, length - room
            cut.append((window_bytes, window))
            window, room = [], window_bytes
        if length:
            window.append((at, to, length))
            room -= length
    if window:
        cut.append((window_bytes - room, window))
    return cut


def _neighbours(source: Sequence[int], target: Sequence[int], page_bytes: int) -> list[PageRun]:
    """Whole pages, as few runs: those that follow each other on both sides are one."""
    runs: list[PageRun] = []
    at = to = count = 0
    for mine, theirs in zip(source, target, strict=True):
        if count and mine == at + count and theirs == to + count:
            count += 1
            continue
        if count:
            runs.append((at * page_bytes, to * page_bytes, count * page_bytes))
        at, to, count = mine, theirs, 1
    if count:
        runs.append((at * page_bytes, to * page_bytes, count * page_bytes))
    return runs


def _strips(layout: KvLayout) -> Iterator[tuple[tuple[int, int], int]]:
    """((layer, head), number of its K strip in a page; V's is the next), as they lie in the page."""
    strip = 0
    for head in layout.kv_heads:
        for layer in layout.layers:
            yield (layer, head), strip
            strip += 2


def _plan(source: KvLayout, target: KvLayout, share: Sequence[tuple[int, int]]) -> TransferPlan:
    """`share`: pairs of strips' numbers, as they lie in the target page."""
    vector = source.head_dim * DTYPE_BYTES[source.dtype]
    source_strip, target_strip = source.page_tokens * vector, target.page_tokens * vector
    strips = [(a * source_strip, b * target_strip) for a, b in share]
    length = min(source_strip, target_strip)
    blocks: list[PageRun] = []
    for at_source, at_target in strips:
        at, to, size = blocks[-1] if blocks else (0, 0, 0)
        if blocks and (at_source, at_target) == (at + size, to + size):
            blocks[-1] = (at, to, size + length)
        else:
            blocks.append((at_source, at_target, length))
    return TransferPlan(
        source_page_tokens=source.page_tokens,
        target_page_tokens=target.page_tokens,
        source_page_bytes=source.page_bytes,
        target_page_bytes=target.page_bytes,
        vector_bytes=vector,
        strips=tuple(strips),
        blocks=tuple(blocks),
    )
