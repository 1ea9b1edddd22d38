"""Which bytes of the sender's pages go where in the receiver's?

A plan is made once per pair of layouts, at connect, and refused there by the field that differs. Pages
are contiguous on both sides, so neighbouring pages merge into one run: few large descriptors. Layers and
heads are compared by id (`layers-by-id`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.pages.errors import LayoutMismatch, Truncated
from services.pages.layout import KvLayout


@dataclass(frozen=True, slots=True)
class PageRun:
    """`length` bytes from offset `source` of the sender's KV region to `target` of the receiver's."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """How pages of one layout map onto pages of another. Today: pages of equal geometry."""

    page_bytes: int

    def runs(self, source: Sequence[int], target: Sequence[int]) -> list[PageRun]:
        """Runs that carry page source[i] to page target[i]. Raises Truncated when the counts differ."""
        if len(source) != len(target):
            raise Truncated(f"{len(source)} pages to send, {len(target)} pages to fill")
        return list(self._merged(zip(source, target, strict=True)))

    def _merged(self, pairs: Iterator[tuple[int, int]]) -> Iterator[PageRun]:
        size = self.page_bytes
        start: tuple[int, int] | None = None
        count = 0
        for source, target in pairs:
            if start is not None and (source, target) == (start[0] + count, start[1] + count):
                count += 1
                continue
            if start is not None:
                yield PageRun(start[0] * size, start[1] * size, count * size)
            start, count = (source, target), 1
        if start is not None:
            yield PageRun(start[0] * size, start[1] * size, count * size)


def plan_transfer(source: KvLayout, target: KvLayout) -> TransferPlan:
    """The plan from a sender's layout to a receiver's. Raises LayoutMismatch naming the field."""
    for field in ("model", "dtype", "page_tokens", "layers", "kv_heads", "head_dim"):
        ours, theirs = getattr(source, field), getattr(target, field)
        if ours != theirs:
            raise LayoutMismatch(field, ours, theirs)
    return TransferPlan(source.page_bytes)


def windows(runs: Sequence[PageRun], window_bytes: int) -> Iterator[list[PageRun]]:
    """Cut runs into puts of at most `window_bytes` each, so that a close waits for one window at most.

    Together the windows carry exactly the runs' bytes, in order. ValueError for a window of no bytes.
    """
    if window_bytes < 1:
        raise ValueError(f"a window of {window_bytes} bytes carries nothing")
    window: list[PageRun] = []
    room = window_bytes
    for run in runs:
        done = 0
        while done < run.length:
            length = min(run.length - done, room)
            window.append(PageRun(run.source + done, run.target + done, length))
            done += length
            room -= length
            if room == 0:
                yield window
                window, room = [], window_bytes
    if window:
        yield window
