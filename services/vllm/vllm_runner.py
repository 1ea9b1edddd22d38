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
        self, model: ModelWorker, memory: VllmKvMemory, requests: RequestCache, vocab_size: int
    ) -> None:
        """`memory`: what the model computes over. `vocab_size`: of the model, without padding of logits."""
        self.model = model
        self.requests = requests
        self._memory = memory
        self._vocab_size = vocab_size

    def logits(self, rows: Sequence[Row]) -> torch.Tensor | None:
        """Return [N, vocabulary] float32 logits at the wanted positions of the checked `rows`, row by row.

        Writes the keys and values of all fed tokens to their pages. All ranks call it. Ranks without logits
        get None.
        """
        self.model.bind(self._memory)
        for row in rows:
            self._clear_tail(row)
        size = self._memory.group.page_tokens
        needed = [(row.pages[: -(-row.end // size)], row.start // size) for row in rows]
        self._memory.copy_layers([page for pages, _ in needed for page in pages], back=False)
        parts = [self._compute(part) for part in self._parts(rows)]
        self._memory.copy_layers([page for pages, first in needed for page in pages[first:]], back=True)
        computed = [part for part in parts if part is not None]
        if len(computed) < 2:
            return computed[0] if computed else None  # not copied, as `torch.cat` would
        return torch.cat(computed)

    def release(self, sequence: TokenSequence) -> None:
        """Forget a sequence that has ended. From any thread."""
        self.requests.release(sequence)

    def _clear_tail(self, row: Row) -> None:
        """Zero the unused end of the row's last page, unless it was zeroed for this sequence before.

        A page that the row enters is zeroed as a whole.
        """
        size, sequence = self._memory.group.page_tokens, row.sequence
        index, used = (row.end - 1) // size, (row.end - 1) % size + 1
        page = row.pages[index]
        if used < size and row.start <= index * size:
            self._memory.tensor[page].zero_()
        elif used < size and sequence.engine_state != page:
            self._memory.clear_tail(page, used)
        sequence.engine_state = None if row.drafts else page

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
