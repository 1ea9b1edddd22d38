"""How does a decode step on a GPU become one call?

A step of a few rows is a thousand small calls, which take longer to make than the GPU takes to do what they
say. What a step of one token a row does is therefore recorded at the start, once for each of some shapes, and
replayed from then on: a step takes the next larger shape, its numbers are copied to where the recorded calls
look for them, and rows that it lacks repeat its last row, which writes the same to the same place. Replays
are used where the first of them gave what the calls give. Other steps are computed call by call.

Whether a replay is the launch of a CUDA graph or the same calls again, on a CPU, only the recorder knows.
"""

from bisect import bisect_left
from collections import abc
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import torch

from baton.engine.execution.paged_attention import PagedAttention
from baton.engine.execution.paged_rows import PagedKernel
from baton.engine.execution.step_plan import integers, make_plan, pack_singles, plan_of_singles
from baton.engine.kv_cache import PagedKvCache
from baton.engine.loading.library_model import Model
from baton.engine.loading.runner_selection import TOLERANCES, gap
from baton.engine_interface import Row, Sequence
from baton.rooms.request import Request
from baton.runtime.errors import in_a_line
from baton.runtime.logging import Log

log = Log(__name__)

Replay = Callable[[], object]

PAGES_MIN: Final = 8
"""Of each row in the narrowest shape."""
TOKENS_MAX: Final = 2**16
"""Of the widest shapes, padding included: room for one layer's keys and values of so many is taken."""
WARM_UPS: Final = 3
"""Runs before a capture, in which libraries choose their kernels and take their memory."""


class Recorder(Protocol):
    def record(self, work: Callable[[], object]) -> Replay:
        """`work` runs, and what it does can be done again, on whatever its tensors hold by then: it takes no
        decision by their contents. Raises RuntimeError where that cannot be had."""


class CudaGraphRecorder:
    """CUDA graphs, which share one pool of memory: only one of them is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], object]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            self._stream.wait_stream(before)
            # Also entered here because torch does not leave it when a capture fails.
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    work()
                # The transfer library's threads may call CUDA meanwhile: they are not to spoil it.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    work()
            before.wait_stream(self._stream)
        return graph.replay


class ReplayDiffers(RuntimeError):
    """A replay gave something else than the calls."""


class BatchShape(NamedTuple):
    rows: int
    pages: int
    """Of each row."""


class RecordedSteps:
    """Steps of up to `rows_max` rows of one token each, over one cache. One step at a time."""

    def __init__(
        self,
        model: Model,
        cache: PagedKvCache,
        recorder: Recorder,
        rows_max: int,
        kernel: PagedKernel | None = None,
    ) -> None:
        """`kernel`: looks at the pages."""
        self._model = model
        self._cache = cache
        self._kernel = kernel
        self._recorder = recorder
        self._rows = sizes(1, rows_max)
        longest = cache.group.pages_for(model.facts.context_length)
        self._pages = sizes(PAGES_MIN, min(longest, cache.pages))
        shapes = [
            BatchShape(rows, pages)
            for rows in self._rows
            for pages in self._pages
            if rows * pages * cache.group.page_tokens <= TOKENS_MAX
        ]
        self.shapes = sorted(shapes, key=lambda shape: shape.rows * shape.pages)
        """Those that are to be recorded, the smallest first."""
        self._recorded: dict[BatchShape, Replay] = {}
        numbers = max(map(_numbers_of, shapes), default=0)
        self._here = torch.zeros(numbers, dtype=torch.int64, pin_memory=model.device.type == "cuda")
        self._there = torch.zeros(numbers, dtype=torch.int64, device=model.device)
        self._logits = cache.tensor.new_zeros(self._rows[-1], model.vocab_size)

    @property
    def recorded(self) -> frozenset[BatchShape]:
        """What is replayed."""
        return frozenset(self._recorded)

    def record_all(self) -> None:
        """Record every shape, and prove each. The cache's contents are lost: before any page is in use."""
        with torch.inference_mode():
            self._cache.tensor.normal_()
            for shape in self.shapes:
                try:
                    self._recorded[shape] = self._recorded_and_proven(shape)
                except ReplayDiffers as error:
                    self._recorded.clear()
                    _tell("no decode step is replayed: replays are not the same", shape, error)
                    break
                except RuntimeError as error:
                    # Not tried any further: the rest is larger, and what failed may have left a mess.
                    _tell("decode steps are not replayed from this shape on", shape, error)
                    break
            self._cache.tensor.zero_()
        log.info("decode steps recorded", shapes=len(self._recorded), of=len(self.shapes))

    def logits(self, rows: abc.Sequence[Row]) -> torch.Tensor | None:
        """[N, vocabulary], of what the checked `rows` want, in their order, until the next step; None, and
        nothing was done, for a step that is not recorded."""
        shape = self._shape_of(rows)
        replay = None if shape is None else self._recorded.get(shape)
        if shape is None or replay is None:
            return None
        self._load(shape, rows)
        replay()
        wanted = [place for place, row in enumerate(rows) if row.wanted]
        return self._logits[: len(rows)] if len(wanted) == len(rows) else self._logits[wanted]

    def _shape_of(self, rows: abc.Sequence[Row]) -> BatchShape | None:
        pages = max(self._cache.group.pages_for(row.stop) for row in rows)
        if any(row.stop - row.start > 1 for row in rows):
            return None
        if len(rows) > self._rows[-1] or pages > self._pages[-1]:
            return None
        return BatchShape(
            self._rows[bisect_left(self._rows, len(rows))], self._pages[bisect_left(self._pages, pages)]
        )

    def _load(self, shape: BatchShape, rows: abc.Sequence[Row]) -> None:
        """Copy a step's numbers to where the recorded calls look. The step before has ended by then: nothing
        reads what is overwritten here."""
        filled = [*rows, *[rows[-1]] * (shape.rows - len(rows))]
        packed = pack_singles(filled, shape.pages, self._cache.group.page_tokens)
        self._here[: len(packed)] = integers(packed)
        self._there[: len(packed)].copy_(self._here[: len(packed)], non_blocking=True)

    def _recorded_and_proven(self, shape: BatchShape) -> Replay:
        numbers = self._there[: _numbers_of(shape)]
        logits = self._logits[: shape.rows]

        def work() -> None:
            plan = plan_of_singles(numbers, shape.rows, self._cache, self._kernel)
            step = PagedAttention(plan, self._cache, self._model.reaches)
            computed = self._model.compute(plan.tokens, plan.positions, plan.keep, step)
            if computed is None:
                raise AssertionError("the rank has no logits")
            logits.copy_(computed)

        self._load(shape, self._rehearsal(shape, 0))
        replay = self._recorder.record(work)
        self._prove(shape, self._rehearsal(shape, 1), replay)
        return replay

    def _prove(self, shape: BatchShape, rows: abc.Sequence[Row], replay: Replay) -> None:
        """On other `rows` than were recorded: none of those are to be part of the recording. Raises
        ReplayDiffers."""
        size = self._cache.group.page_tokens
        pages = [row.pages[row.start // size] for row in rows]
        places = [row.start % size for row in rows]
        entries = self._cache.tensor.permute(0, 4, 1, 2, 3, 5)
        """[page][token][kv head][layer][plane][head_dim]"""
        plan = make_plan(rows, self._cache, self._model.device, kernel=self._kernel)
        step = PagedAttention(plan, self._cache, self._model.reaches)
        expected = self._model.compute(plan.tokens, plan.positions, plan.keep, step)
        if expected is None:
            raise AssertionError("the rank has no logits")
        written = entries[pages, places]
        entries[pages, places] = 0
        self._logits.zero_()
        self._load(shape, rows)
        replay()
        gaps = [
            gap(self._logits[: len(rows)].float(), expected.float()),
            gap(entries[pages, places].float(), written.float()),
        ]
        if not all(each <= TOLERANCES[self._model.dtype] for each in gaps):
            raise ReplayDiffers(f"results differ by {max(gaps):.2g} of their length")

    def _rehearsal(self, shape: BatchShape, turn: int) -> list[Row]:
        """Rows as long as the cache has pages for, each a little shorter than the one before; in every turn
        other tokens, positions and pages."""
        kv, longest = self._cache.group, self._model.facts.context_length
        count = min(shape.rows, self._cache.pages)
        pages = min(shape.pages, self._cache.pages // count)
        most = min(pages * kv.page_tokens, longest)
        rows = []
        for index in range(count):
            stop = max(1, most - index - turn)
            prompt = ((index + turn) % self._model.vocab_size,) * stop
            place = (index + turn) % count
            table = range(place * pages, (place + 1) * pages)[:: 1 if turn else -1]
            sequence = Sequence(Request("rehearsal", prompt, max_tokens=1), [])
            rows.append(Row(sequence, stop - 1, stop, (table,), sample=True))
        return rows


def recorded_steps(
    model: Model, cache: PagedKvCache, rows_max: int, kernel: PagedKernel | None = None
) -> RecordedSteps | None:
    """Of up to `rows_max` rows, where this model's steps can be captured. Nothing is recorded yet."""
    if rows_max < 1 or model.device.type != "cuda" or not model.taken_apart:
        return None
    return RecordedSteps(model, cache, CudaGraphRecorder(model.device), rows_max, kernel)


def sizes(first: int, last: int) -> list[int]:
    """`first` and its doublings below `last`, and `last`."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last]


def _numbers_of(shape: BatchShape) -> int:
    """Token, position and page to write to of each row, and its page table."""
    return shape.rows * (3 + shape.pages)


def _tell(what: str, shape: BatchShape, error: RuntimeError) -> None:
    # Ending a capture in which something has failed fails too: the cause is what came before.
    cause = error.__context__ or error
    log.warning(what, rows=shape.rows, pages=shape.pages, why=in_a_line(cause))
