"""Runner that replays recorded decode steps on a GPU, as CUDA graphs.

A step of few rows is about a thousand small calls. Making them takes longer than the GPU takes to run them.
So decode steps of one token a row are recorded at start, for some batch shapes, and replayed later. A step
uses the next larger shape. Its numbers are copied to where the recorded calls read them, and missing rows
repeat the last row, which writes the same values to the same place. A replay is used only if its first run
agreed with the calls. All other steps are computed call by call.

Only the recorder knows whether a replay launches a CUDA graph or, on a CPU in tests, makes the calls again.
"""

from bisect import bisect_left
from collections import abc
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import torch

from baton.engine.execution.agreement import TOLERANCES, relative_difference
from baton.engine.execution.batched_runner import BatchedRunner
from baton.engine.execution.step_plan import (
    AttentionMetadata,
    integers,
    make_plan,
    pack_singles,
    plan_of_singles,
)
from baton.engine_interface import Row, Sequence
from baton.inference.runner import StatelessRunner
from baton.rooms.request import Request
from baton.runtime.errors import describe_error
from baton.runtime.logging import Log
from baton.sampling.draft_rows import split_drafts

log = Log(__name__)

Replay = Callable[[], object]

PAGES_MIN: Final = 8
"""Number of pages that each row has in the smallest batch shapes."""
TOKENS_MAX: Final = 2**16
"""Most tokens that the pages of all rows of a batch shape may hold. Memory for one layer's keys and values of
so many tokens is allocated."""
WARM_UPS: Final = 3
"""Number of runs before a capture, in which libraries choose kernels and allocate memory."""


class Recorder(Protocol):
    """Records a sequence of GPU calls, such as those of a decode step, so that it can be repeated on other
    inputs."""

    def record(self, work: Callable[[], object]) -> Replay:
        """Run `work` and return a function that repeats it on the current contents of its tensors.

        `work` must make the same calls whatever these contents are. Raises RuntimeError if it cannot be
        recorded.
        """


class CudaGraphRecorder:
    """Recorder that captures CUDA graphs, which share one memory pool. Only one of them is replayed at a
    time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], object]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            self._stream.wait_stream(before)
            # Entered here as well, because torch does not leave the stream when a capture fails.
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    work()
                # Threads of the transfer library may call CUDA meanwhile, and must not end the capture.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    work()
            before.wait_stream(self._stream)
        return graph.replay


class ReplayDiffers(RuntimeError):
    """A replayed CUDA graph gave other logits than the same step computed call by call."""


class BatchShape(NamedTuple):
    """Size of a recorded decode step: number of rows, and number of pages in each row."""

    rows: int
    pages: int
    """Number of entries of each row's page table."""


class GraphRunner(StatelessRunner):
    """Runner that replays recorded steps of up to `rows_max` rows of one token each.

    All other steps are computed by the runner `calls`.
    """

    def __init__(
        self,
        calls: BatchedRunner,
        recorder: Recorder,
        rows_max: int,
        *,
        context_length: int,
        vocab_size: int,
    ) -> None:
        """Choose the batch shapes to record. Nothing is recorded yet.

        `calls`: computes steps call by call. `rows_max`: rows of the largest recorded step. `context_length`:
        most tokens of a row.
        """
        self._calls = calls
        self._cache = cache = calls.cache
        self._recorder = recorder
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._rows = sizes(1, rows_max)
        self._pages = sizes(PAGES_MIN, min(cache.group.pages_for(context_length), cache.pages))
        shapes = [
            BatchShape(rows, pages)
            for rows in self._rows
            for pages in self._pages
            if rows * pages * cache.group.page_tokens <= TOKENS_MAX
        ]
        self.shapes = sorted(shapes, key=lambda shape: shape.rows * shape.pages)
        """Batch shapes (rows and pages per row) of decode steps that are to be recorded, the smallest first.
        """
        self._recorded: dict[BatchShape, Replay] = {}
        device = cache.tensor.device
        numbers = max(map(_input_numbers, shapes), default=0)
        self._host_input = torch.zeros(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._input = torch.zeros(numbers, dtype=torch.int64, device=device)
        self._logits = cache.tensor.new_zeros(self._rows[-1], vocab_size)

    @property
    def recorded(self) -> frozenset[BatchShape]:
        """Batch shapes of decode steps (rows and pages per row) that are recorded, so that a step can be
        replayed."""
        return frozenset(self._recorded)

    def record(self) -> None:
        """Record a step of every batch shape, and verify each replay.

        Overwrites the KV cache: call it before any page is in use.
        """
        with torch.inference_mode():
            self._cache.tensor.normal_()
            for shape in self.shapes:
                try:
                    self._recorded[shape] = self._record_and_verify(shape)
                except ReplayDiffers as error:
                    self._recorded.clear()
                    _warn("no decode step is replayed: replays are not the same", shape, error)
                    break
                except RuntimeError as error:
                    # The remaining shapes are larger, and the failure may have left memory allocated.
                    _warn("decode steps are not replayed from this shape on", shape, error)
                    break
            self._cache.tensor.zero_()
        log.info("decode steps recorded", shapes=len(self._recorded), of=len(self.shapes))

    def logits(self, rows: abc.Sequence[Row]) -> torch.Tensor | None:
        """Return the logits of a step as `Runner.logits` does. If it is a replay, the next step overwrites
        them."""
        single = split_drafts(rows)
        replayed = self.replay(single)
        if replayed is not None:
            return replayed
        cache = self._cache
        return self._calls.compute(make_plan(single, cache, cache.tensor.device, self._calls.kernel))

    def replay(self, rows: abc.Sequence[Row]) -> torch.Tensor | None:
        """Return the logits of a replayed step, or None without any effect if no recorded shape fits `rows`.

        `rows`: rows without draft tokens.
        """
        shape = self._shape_for(rows)
        replay = None if shape is None else self._recorded.get(shape)
        if shape is None or replay is None:
            return None
        self._load(shape, rows)
        replay()
        wanted = [index for index, row in enumerate(rows) if row.wanted]
        return self._logits[: len(rows)] if len(wanted) == len(rows) else self._logits[wanted]

    def _shape_for(self, rows: abc.Sequence[Row]) -> BatchShape | None:
        pages = max(self._cache.group.pages_for(row.stop) for row in rows)
        if any(row.stop - row.start > 1 for row in rows):
            return None
        if len(rows) > self._rows[-1] or pages > self._pages[-1]:
            return None
        return BatchShape(
            self._rows[bisect_left(self._rows, len(rows))], self._pages[bisect_left(self._pages, pages)]
        )

    def _load(self, shape: BatchShape, rows: abc.Sequence[Row]) -> None:
        """Copy the tokens, positions and page tables of `rows` to the tensors that the calls recorded for
        `shape` read.

        The previous step has ended by then, so nothing reads the overwritten numbers.
        """
        filled = [*rows, *[rows[-1]] * (shape.rows - len(rows))]
        packed = pack_singles(filled, shape.pages, self._cache.group.page_tokens)
        self._host_input[: len(packed)] = integers(packed)
        self._input[: len(packed)].copy_(self._host_input[: len(packed)], non_blocking=True)

    def _record_and_verify(self, shape: BatchShape) -> Replay:
        numbers = self._input[: _input_numbers(shape)]
        logits = self._logits[: shape.rows]

        def work() -> None:
            logits.copy_(
                self._computed(plan_of_singles(numbers, shape.rows, self._cache, self._calls.kernel))
            )

        self._load(shape, self._rehearsal(shape, 0))
        replay = self._recorder.record(work)
        self._verify(shape, self._rehearsal(shape, 1), replay)
        return replay

    def _verify(self, shape: BatchShape, rows: abc.Sequence[Row], replay: Replay) -> None:
        """Compare a replay for the test rows `rows` with the same step computed call by call.

        The step was recorded with other rows. Raises ReplayDiffers.
        """
        size = self._cache.group.page_tokens
        pages = [row.pages[row.start // size] for row in rows]
        offsets = [row.start % size for row in rows]
        entries = self._cache.tensor.permute(0, 4, 1, 2, 3, 5)
        """KV cache as [page][token][kv head][layer][plane][head_dim]."""
        expected = self._computed(make_plan(rows, self._cache, self._cache.tensor.device, self._calls.kernel))
        written = entries[pages, offsets]
        entries[pages, offsets] = 0
        self._logits.zero_()
        self._load(shape, rows)
        replay()
        differences = [
            relative_difference(self._logits[: len(rows)].float(), expected.float()),
            relative_difference(entries[pages, offsets].float(), written.float()),
        ]
        if not all(each <= TOLERANCES[self._cache.group.dtype] for each in differences):
            raise ReplayDiffers(f"results differ by {max(differences):.2g} of their length")

    def _computed(self, plan: AttentionMetadata) -> torch.Tensor:
        logits = self._calls.compute(plan)
        if logits is None:
            raise AssertionError("the rank has no logits")
        return logits

    def _rehearsal(self, shape: BatchShape, turn: int) -> list[Row]:
        """Return test rows of `shape`, or as many as the cache has pages for.

        Each row is a little shorter than the one before. Another number `turn` gives other tokens, positions
        and pages.
        """
        kv = self._cache.group
        count = min(shape.rows, self._cache.pages)
        pages = min(shape.pages, self._cache.pages // count)
        most = min(pages * kv.page_tokens, self._context_length)
        rows = []
        for index in range(count):
            stop = max(1, most - index - turn)
            prompt = ((index + turn) % self._vocab_size,) * stop
            first = (index + turn) % count
            table = range(first * pages, (first + 1) * pages)[:: 1 if turn else -1]
            sequence = Sequence(Request("rehearsal", prompt, max_tokens=1), [])
            rows.append(Row(sequence, stop - 1, stop, (table,), sample=True))
        return rows


def sizes(first: int, last: int) -> list[int]:
    """Return the ascending sizes `first`, twice `first`, four times `first` and so on, as far as they are
    below `last`, and then `last`."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last]


def _input_numbers(shape: BatchShape) -> int:
    """Return the count of input numbers of a recorded step.

    Each row has a token, its position, the page to write to, and a page table.
    """
    return shape.rows * (3 + shape.pages)


def _warn(message: str, shape: BatchShape, error: RuntimeError) -> None:
    # Ending a capture in which something has failed fails too: the cause is the earlier error.
    cause = error.__context__ or error
    log.warning(message, rows=shape.rows, pages=shape.pages, why=describe_error(cause))
