"""What does a worker call to compute?

One engine serves both roles: a row of many tokens is prefill, a row of one is decode, and a step may hold
both. The worker owns the pages and the sequences; the engine owns the memory, the weights and the draw.
"""

from collections import abc
from pathlib import Path

import torch

from services.engine.attention import PagedStep
from services.engine.checksum import PageSummer
from services.engine.kv_cache import PagedKvCache, pages_that_fit
from services.engine.model import Model, load_model
from services.engine.plan import make_plan
from services.engine.rows import PageSum, Row, Sequence, SumPart, check
from services.engine.sampler import sample
from services.pages.layout import KvLayout
from services.rooms.request import Request, Token

__all__ = ["Engine", "PageSum", "Row", "Sequence", "SumPart", "load_engine"]

WARM_UP_TOKENS = 64


class Engine:
    """A model over a paged KV cache. One step at a time, from one thread at a time."""

    def __init__(self, model: Model, layout: KvLayout, cache: PagedKvCache) -> None:
        self.model = model
        self.layout = layout
        self.cache = cache
        self._summer = PageSummer(cache)

    def step(self, rows: abc.Sequence[Row]) -> list[Token | None]:
        """Compute each row's positions and draw its next token where the row asks. No two rows share a
        page that one of them writes.

        Returns one entry a row, None where `sample` is False; appends nothing to `output`. The keys and
        values of all rows are in their pages when it returns (`written-before-sent`). Raises ValueError,
        before anything is computed, for a row that cannot be computed, and NotANumber for a broken model.
        """
        for row in rows:
            check(row, self.layout.page_tokens, self.cache.pages, self.model.facts.context_length)
            self._check_ids(row)
        if not rows:
            return []
        for row in rows:
            self._clear_tail(row)
        plan = make_plan(rows, self.cache, self.model.device)
        with torch.inference_mode():
            logits = self.model.logits(plan.tokens, plan.positions, plan.keep, PagedStep(plan, self.cache))
            drawn = iter(sample(logits, [row.sequence for row in rows if row.sample]))
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)
        self.sum_pages(
            [SumPart(row.sequence.page_sum, row.pages, row.stop) for row in rows if row.sequence.page_sum]
        )
        return [next(drawn) if row.sample else None for row in rows]

    def sum_pages(self, parts: abc.Sequence[SumPart]) -> None:
        """Carry each sum on over what its pages hold now."""
        for part in parts:
            if part.sum.stop < part.stop:
                part.sum.total += self._summer.total(part.pages, part.sum.stop, part.stop)
                part.sum.stop = part.stop

    def warm_up(self) -> None:
        """Run a prompt and a token through the first pages, so that the first request finds everything
        loaded and allocated. Before any page is in use."""
        capacity = min(self.cache.tokens, self.model.facts.context_length)
        prompt = min(WARM_UP_TOKENS, capacity)
        sequence = Sequence(Request("warm-up", prompt=(0,) * prompt, max_tokens=2), [])
        pages = range(self.layout.pages_for(min(prompt + 1, capacity)))
        self.step([Row(sequence, 0, prompt, pages, sample=True)])
        if prompt < capacity:
            sequence.output.append(0)
            self.step([Row(sequence, prompt, prompt + 1, pages, sample=True)])

    def _check_ids(self, row: Row) -> None:
        for token in row.sequence.tokens(row.start, row.stop):
            if not 0 <= token < self.model.vocab_size:
                raise ValueError(
                    f"{row.sequence.request.request_id}: token id {token} of a vocabulary of "
                    f"{self.model.vocab_size}"
                )

    def _clear_tail(self, row: Row) -> None:
        """Zero the unused end of the row's last page, unless this sequence had it zeroed before."""
        size = self.layout.page_tokens
        index, used = (row.stop - 1) // size, (row.stop - 1) % size + 1
        page = row.pages[index]
        entered = row.start <= index * size
        if used < size and (entered or row.sequence.tail_page != page):
            self.cache.clear_tail(page, used)
        row.sequence.tail_page = page


def load_engine(
    directory: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    page_tokens: int = 16,
    kv_cache_memory: int = 2**30,
    threads: int = 1,
) -> Engine:
    """Load the model in `directory` and take `kv_cache_memory` bytes at most for its pages.

    `dtype`: "auto", "bfloat16" or "float32", of weights and pages alike. `device`: "auto", "cpu" or
    "cuda[:N]". `threads`: of the CPU's tensor operations, for the whole process. Raises StartupError: a
    missing, damaged or unsupported model, a device that is not there, too little memory.
    """
    torch.set_num_threads(threads)
    model = load_model(directory, dtype, device)
    geometry = model.geometry
    layout = KvLayout(
        model=model.facts.fingerprint,
        dtype=model.dtype,
        page_tokens=page_tokens,
        layers=tuple(range(geometry.layers)),
        kv_heads=tuple(range(geometry.kv_heads)),
        head_dim=geometry.head_dim,
    )
    return Engine(model, layout, PagedKvCache(layout, pages_that_fit(layout, kv_cache_memory), model.device))
