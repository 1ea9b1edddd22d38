"""Plan of a transfer: which bytes of each sender rank's pages go where in each receiver rank's pages.

A plan is made once per pair of workers, when they connect. If their layouts do not fit, the connection is
refused with the differing field. Layers and heads are compared by id (`layers-by-id`). Every (layer, head) of
a receiver rank comes from exactly one sender rank. That rank copies one strip for each plane: the vectors of
this layer and head at all positions of a page. Strips that are adjacent in both pages are copied as one run,
and so are adjacent whole pages. So transfers need few, large descriptors. Each KV group has its own pages and
its own plan. States are sent whole, when the last token is computed.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from typing import Final, TypeAlias

from baton.pages.compatibility import check_fit
from baton.pages.errors import Truncated
from baton.pages.layout import KvGroup, KvLayout

POSITIONS_MAX: Final = 2**62
"""Number of positions that means without limit."""

PageRun: TypeAlias = tuple[int, int, int]
"""Bytes to copy, as (source, target, length): `length` bytes from offset `source` of the sender's KV region
to offset `target` of the receiver's. A plain tuple, because a window may have thousands, and a named tuple
takes 5 times as long to make."""

Window: TypeAlias = tuple[int, list[PageRun]]
"""One write to a peer: the total length of its runs in bytes, and the list of its runs."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Plan of one KV group for one sender rank and one receiver rank. One side's page size is a multiple of
    the other's."""

    source_page_tokens: int
    target_page_tokens: int
    is_state: bool = False
    """Whether a page holds the state of a whole sequence."""
    source_page_bytes: int = 0
    target_page_bytes: int = 0
    blocks: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """Byte runs within a page that copy all strips of one piece. Each entry has the length of its runs in
    bytes, and their offsets as (source page, target page)."""

    @property
    def empty(self) -> bool:
        """Whether this sender rank sends nothing of this KV group to that receiver rank."""
        return not self.blocks

    @property
    def whole(self) -> bool:
        """Whether pages are copied as a whole, without a change of layout. Adjacent pages then form one
        run."""
        return self.blocks[0][0] == self.source_page_bytes == self.target_page_bytes

    @property
    def piece_tokens(self) -> int:
        """Tokens of one piece, the smallest part of the KV that is copied. It is the page size of sender or
        receiver, whichever is smaller, and divides the other."""
        return min(self.source_page_tokens, self.target_page_tokens)

    def span(self, first: int, start: int, stop: int, *, ends: bool) -> tuple[int, int, int]:
        """Return the arguments `first`, `start` and `stop` of `runs` that copy positions [start, stop).

        A state is copied whole, with the end of its sequence. `ends`: whether `stop` is that end.
        """
        if self.is_state:
            return 0, 0, self.piece_tokens if ends else 0
        return first, start, -(-stop // self.piece_tokens) * self.piece_tokens

    @property
    def piece_runs(self) -> int:
        """Upper bound on the number of byte runs that copy one piece (`piece_tokens` positions)."""
        return sum(len(places) for _, places in self.blocks)

    @property
    def piece_bytes(self) -> int:
        return sum(length * len(places) for length, places in self.blocks)

    def runs(
        self, source: Sequence[int], target: Sequence[int], first: int, start: int, stop: int
    ) -> list[PageRun]:
        """Return the byte runs that copy positions [start, stop) of a room in this KV group. Both numbers are
        multiples of `piece_tokens`.

        `source`: the sender's page table from position 0. `target`: the receiver's pages from position
        `first` on. Raises Truncated if a table is too short.
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
        source_pieces, target_pieces = self.source_page_tokens // small, self.target_page_tokens // small
        return [
            (at + block_at, to + block_to, length)
            for length, places in self.blocks
            for at, to in zip(
                _places(source, self.source_page_bytes, source_pieces, length, begin, end),
                _places(target, self.target_page_bytes, target_pieces, length, begin - before, end - before),
                strict=True,
            )
            for block_at, block_to in places
        ]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Plan of a transfer from one sender rank to one receiver rank, over all KV groups."""

    groups: tuple[GroupPlan, ...]

    @property
    def empty(self) -> bool:
        """Whether this sender rank sends nothing to that receiver rank."""
        return all(group.empty for group in self.groups)

    def stretch(self, length: int, count: int) -> int:
        """Return the largest number of positions whose transfer takes at most `length` bytes and `count`
        runs.

        States do not count. The result is at least the smallest number of positions that fills whole pages in
        every other group, even if that exceeds the limits. Must not be called for an empty plan.
        """
        sent = [group for group in self.groups if not (group.empty or group.is_state)]
        if not sent:
            return POSITIONS_MAX
        least = lcm(*(group.piece_tokens for group in sent))
        size = sum(least // group.piece_tokens * group.piece_bytes for group in sent)
        runs = sum(least // group.piece_tokens * group.piece_runs for group in sent)
        return least * max(1, min(length // size, count // runs))

    def runs(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        first: int,
        start: int,
        stop: int,
        *,
        ends: bool,
    ) -> list[list[PageRun]]:
        """Return the byte runs that copy positions [start, stop) of a room, as one list for each KV group.

        For each group, `stop` is rounded up to whole pages of the smaller size. `sources`, `targets`: page
        tables by group. `ends`: whether `stop` is the end of the sequence, and all of it is computed. Only
        then states are copied (`state-at-its-end`). Other arguments and errors: see `GroupPlan.runs`.
        """
        return [
            group.runs(source, target, *group.span(first, start, stop, ends=ends))
            for group, source, target in zip(self.groups, sources, targets, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class HandoverPlan:
    """Plan of all transfers from one prefill worker to one decode worker, for every pair of ranks."""

    plans: tuple[tuple[TransferPlan, ...], ...]
    """Transfer plan of each pair of ranks. The index is the sender's rank, and in each entry the receiver's
    rank."""

    def between(self, sender: int, receiver: int) -> TransferPlan:
        return self.plans[sender][receiver]


def plan_hand_over(senders: Sequence[KvLayout], receivers: Sequence[KvLayout]) -> HandoverPlan:
    """Return the plan of all transfers from one worker to another. Raises LayoutMismatch, which names the
    field.

    `senders`, `receivers`: one KV layout for each rank of the worker, in rank order.
    """
    check_fit(senders, receivers)
    by_group = [
        _plans(ours, theirs)
        for ours, theirs in zip(
            zip(*(layout.groups for layout in senders), strict=True),
            zip(*(layout.groups for layout in receivers), strict=True),
            strict=True,
        )
    ]
    return HandoverPlan(
        tuple(
            tuple(
                TransferPlan(tuple(plans[sender][receiver] for plans in by_group))
                for receiver in range(len(receivers))
            )
            for sender in range(len(senders))
        )
    )


def windows(runs: list[PageRun], window_bytes: int) -> list[Window]:
    """Divide runs into windows, each for one write of at most `window_bytes`.

    Small windows bound the time until a closed room has no write under way. Together, the windows carry
    exactly the bytes of the runs, in order. Raises ValueError if `window_bytes` is 0.
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
    """Return the runs that copy whole pages. Pages that are adjacent both at the sender and at the receiver
    form one run."""
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


def _places(table: Sequence[int], page_bytes: int, each: int, length: int, begin: int, end: int) -> list[int]:
    """Return the byte offset of each piece [begin, end) of a sequence in the KV region.

    The offsets are those of a strip (vectors of one layer and head) that lies at the start of its page.
    `table`: page table. `each`: number of pieces in a page of this side. `length`: bytes of one piece.
    """
    if each == 1:
        return [page * page_bytes for page in table[begin:end]]
    return [table[place // each] * page_bytes + place % each * length for place in range(begin, end)]


def _plans(senders: Sequence[KvGroup], receivers: Sequence[KvGroup]) -> list[list[GroupPlan]]:
    """Return the plans of one KV group for all pairs of ranks, as a list by sender rank of lists by receiver
    rank.

    `senders`, `receivers`: geometry of the KV group on each rank.
    """
    holders: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for rank, group in enumerate(senders):
        for place, each in enumerate(group.places()):
            holders[each].append((rank, place))
    shares: list[list[list[tuple[int, int]]]] = [[[] for _ in receivers] for _ in senders]
    for receiver, group in enumerate(receivers):
        for target, each in enumerate(group.places()):
            those = holders[each]
            sender, source = those[receiver % len(those)]  # replicas of a head share the work
            shares[sender][receiver].append((source, target))
    return [
        [_plan(senders[sender], receivers[receiver], share) for receiver, share in enumerate(row)]
        for sender, row in enumerate(shares)
    ]


def _plan(source: KvGroup, target: KvGroup, share: Sequence[tuple[int, int]]) -> GroupPlan:
    """Return the plan of one KV group for a pair of ranks.

    `share`: (layer, head) strips to copy, each as its index in the source page and in the target page. They
    are in the order of the target page.
    """
    vectors = [source.vector_bytes(plane) for plane in source.planes]
    *before, together = accumulate(vectors, initial=0)
    small = min(source.page_positions, target.page_positions)
    runs: list[PageRun] = []
    for place, to_place in share:
        for offset, vector in zip(before, vectors, strict=True):
            strip = (place * together + offset) * source.page_positions
            to_strip = (to_place * together + offset) * target.page_positions
            at, to, length = runs[-1] if runs else (0, 0, 0)
            if runs and (strip, to_strip) == (at + length, to + length):
                runs[-1] = (at, to, length + small * vector)
            else:
                runs.append((strip, to_strip, small * vector))
    blocks: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for at, to, length in runs:
        blocks[length].append((at, to))
    return GroupPlan(
        source_page_tokens=source.page_tokens,
        target_page_tokens=target.page_tokens,
        is_state=source.is_state,
        source_page_bytes=source.page_bytes,
        target_page_bytes=target.page_bytes,
        blocks=tuple((length, tuple(places)) for length, places in blocks.items()),
    )
