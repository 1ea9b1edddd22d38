"""Runner of steps: rows in, logits at their wanted positions out, computed by vLLM's worker."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from baton.engine_interface import Row
from baton.engine_interface import Sequence as TokenSequence
from baton.vllm.memory import VllmKvMemory
from baton.vllm.rows import RequestCache
from baton.vllm.worker import ModelWorker


class VllmRunner:
    """A `Runner` over one worker of vLLM. Its sampler is never called."""

    def __init__(
        self,
        model: ModelWorker,
        memories: Sequence[VllmKvMemory],
        requests: RequestCache,
        vocab_size: int,
    ) -> None:
        """`memories`: what the model computes over, by KV group. `vocab_size`: without padding of logits."""
        self.model = model
        self.requests = requests
        self._memories = memories
        self._vocab_size = vocab_size

    def logits(self, rows: Sequence[Row]) -> torch.Tensor | None:
        """Return [N, vocabulary] float32 logits at the wanted positions of the checked `rows`, row by row.

        Writes the keys and values of all fed tokens to their pages. All ranks call it. Ranks without logits
        get None.
        """
        self.model.bind(self._memories)
        for row in rows:
            self._prepare(row)
        for number, memory in enumerate(self._memories):
            size = memory.group.page_tokens
            memory.load([row.tables[number][: -(-row.end // size)] for row in rows])
        parts = [self._compute(part) for part in self._parts(rows)]
        for number, memory in enumerate(self._memories):
            size = memory.group.page_tokens
            memory.store([row.tables[number][row.start // size : -(-row.end // size)] for row in rows])
        computed = [part for part in parts if part is not None]
        if len(computed) < 2:
            return computed[0] if computed else None  # not copied, as `torch.cat` would
        return torch.cat(computed)

    def release(self, sequence: TokenSequence) -> None:
        """Forget a sequence that has ended. From any thread."""
        self.requests.release(sequence)

    def _prepare(self, row: Row) -> None:
        """Prepare the pages of a row, and remember for its sequence which pages have zeros behind it."""
        known = row.sequence.engine_state
        cleared = known if isinstance(known, tuple) else (None,) * len(self._memories)
        pages = [
            memory.prepare(row, table, before)
            for memory, table, before in zip(self._memories, row.tables, cleared, strict=True)
        ]
        row.sequence.engine_state = None if row.drafts else tuple(pages)

    def _parts(self, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
        """Yield the rows in parts that one call of the worker takes."""
        start = tokens = 0
        for index, row in enumerate(rows):
            length = row.end - row.start
            is_full = index - start == self.model.rows_max or tokens + length > self.model.tokens_max
            if is_full and index > start:
                yield rows[start:index]
                start, tokens = index, 0
            tokens += length
        yield rows[start:]

    def _compute(self, rows: Sequence[Row]) -> torch.Tensor | None:
        runner = self.model.runner
        scheduled, names = self.requests.schedule(rows)
        try:
            self.model.worker.execute_model(scheduled)
        except BaseException:
            self.requests.forget_all(scheduled.finished_req_ids)
            raise
        state, runner.execute_model_state = runner.execute_model_state, None
        if state is None:  # not the last stage of a pipeline
            return None
        order, counts = list(runner.input_batch.req_ids), scheduled.num_scheduled_tokens
        ends = dict(zip(order, accumulate(counts[name] for name in order), strict=True))
        named = [(name, row) for name, row in zip(names, rows, strict=True) if row.wanted]
        wanted = [ends[name] - row.end + position for name, row in named for position in row.wanted]
        if wanted == [ends[name] - 1 for name, _ in named]:  # vLLM has them, one of each request
            logits, wanted = state.logits, [order.index(name) for name, _ in named]
        else:
            logits = runner.model.compute_logits(state.hidden_states[torch.tensor(wanted)])
            wanted = list(range(len(wanted)))
        if logits is None or not wanted:  # another tensor rank has them
            return None
        chosen: torch.Tensor = logits if wanted == list(range(len(logits))) else logits[torch.tensor(wanted)]
        return chosen[:, : self._vocab_size].float()
