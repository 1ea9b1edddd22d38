"""The step of an engine on one rank: logits, sampled tokens, prompt scores, page checksums and proposals.

Every engine on torch is a `StepEngine` with a `Runner` for the logits, a KV cache and facts. The guarantees
for a step in `services/engine_interface.py` are implemented here once, for all engines.
"""

from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch

from baton.engine_interface import (
    EngineFacts,
    EngineLost,
    LogitsNotFinite,
    PageSumRequest,
    RankGroupBroken,
    Row,
    RowResult,
    Sequence,
)
from baton.grammars.grammar_cache import GrammarCache
from baton.inference.collectives import Collectives
from baton.inference.device import bind_thread
from baton.inference.kv_memory import KvCache
from baton.inference.page_checksum import PageSummer
from baton.inference.row_check import check_row
from baton.inference.runner import Runner
from baton.inference.sampled_results import (
    add_page_sums,
    broadcast_proposals,
    broadcast_scores,
    draw_tokens,
)
from baton.pages.layout import PLAIN, GroupHead, KvLayout
from baton.pages.rank_layout import rank_layout
from baton.rooms.request import Request
from baton.runtime.errors import StartupError
from baton.sampling.draft_model import DraftModel
from baton.sampling.prompt_scores import scored_positions_max
from baton.sampling.proposer import Proposer

WARM_UP_TOKENS: Final = 64


@contextmanager
def _device_loss() -> Iterator[None]:
    """Context manager that turns torch's error for a lost device into EngineLost."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise EngineLost(f"{type(error).__name__}: {error}") from error


class StepEngine:
    """Implementation of `engine_interface.Engine` on one rank, for all engines on torch."""

    def __init__(
        self,
        whole: KvLayout,
        caches: abc.Sequence[KvCache],
        rank_group: Collectives,
        runner: Runner,
        facts: EngineFacts,
        *,
        vocab_size: int,
        context_length: int,
        flush: Callable[[], None] | None = None,
        grammars: GrammarCache | None = None,
    ) -> None:
        """Build an engine from its KV caches, one for each KV group, and the runner that computes logits.

        `whole`: layout of the worker's pages over all ranks. `flush`: called before pages are read that other
        processes may have written. `grammars`: compiles grammars, on the rank that samples.
        """
        self.facts = facts
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.whole = whole
        self.layout = rank_layout(whole, rank_group.topology, rank_group.rank)
        self.caches = tuple(caches)
        self.device = torch.device(caches[0].device)
        self.runner = runner
        self.grammars = grammars
        self.draft_pages: DraftModel | None = None
        self.scored_max = scored_positions_max(vocab_size)
        self._rank_group = rank_group
        self._drawer = drawing_rank(rank_group)
        self._summers = [PageSummer(cache) for cache in caches]
        self._proposer = Proposer()
        self._flush = flush

    @property
    def cache(self) -> KvCache:
        """Cache of the first KV group, which is the only one of most models."""
        return self.caches[0]

    @property
    def draws(self) -> bool:
        """Whether this rank is the one that samples the worker's tokens."""
        return self._rank_group.rank == self._drawer

    def draft_with(self, model: DraftModel) -> None:
        """Let `model` draft tokens for the sequences that want drafts.

        Called before the first step, on the rank that samples.
        """
        self.draft_pages = model
        self._proposer = Proposer(model)

    def bind_thread(self) -> None:
        # A thread uses the number of threads that was set only after it has read that number.
        torch.get_num_threads()
        bind_thread(str(self.device))

    @_device_loss()
    def step(self, rows: abc.Sequence[Row]) -> list[RowResult]:
        pages = [cache.pages for cache in self.caches]
        for row in rows:
            check_row(row, self.layout.groups, pages, self.context_length)
            self._check_ids(row)
        scored = sum(len(row.scored) for row in rows)
        if scored > self.scored_max:
            raise ValueError(f"{scored} positions to be scored in a step, at most {self.scored_max} are")
        if not rows:
            return []
        try:
            return self._step(rows)
        except RankGroupBroken:
            raise
        except Exception as error:
            if self._rank_group.topology.ranks == 1:
                self._wait()  # the pages of its rooms are freed next
                raise
            raise self._rank_group.leave(f"{type(error).__name__}: {error}") from error

    def _step(self, rows: abc.Sequence[Row]) -> list[RowResult]:
        taken, spoilt = self._computed(rows)
        if spoilt:  # maybe by masked drafts: zero times NaN is NaN
            again, _ = self._computed([replace(rows[index], drafts=()) for index in spoilt])
            for index, each in zip(spoilt, again, strict=True):
                taken[index] = each
        self._sum_up(
            [
                PageSumRequest(row.sequence.page_sum, row.tables, self._summed_stop(row), row.sample)
                for row in rows
                if row.sequence.page_sum
            ]
        )
        summed = [row.sequence.page_sum for row in rows if row.sample]
        add_page_sums(self._rank_group, self.whole, [each for each in summed if each])
        broadcast_proposals(self._rank_group, self._drawer, self._proposer, rows, taken)
        return taken

    def _computed(self, rows: abc.Sequence[Row]) -> tuple[list[RowResult], list[int]]:
        """Return the results of `rows`, and the indices of rows with drafts whose logits are not finite."""
        taken = self._compute(rows)
        outcomes = enumerate(zip(rows, taken, strict=True))
        spoilt = [
            index for index, (row, each) in outcomes if row.drafts and isinstance(each, LogitsNotFinite)
        ]
        return taken, spoilt

    def _compute(self, rows: abc.Sequence[Row]) -> list[RowResult]:
        if self._flush is not None:
            self._flush()
        for row in rows:
            self._copy_states(row.state_from, row.tables)
        self.prepare(rows)
        drawing = [row for row in rows if row.sample]
        with torch.inference_mode():
            logits = self.runner.logits(rows)
            spoilt, logits = self._score(rows, logits)
            drawn = draw_tokens(self._rank_group, self._drawer, logits, drawing, self.vocab_size)
            for row in rows:
                self._copy_states(row.tables, row.state_to)
            self._wait()
        results: dict[int, RowResult] = {id(row): each for row, each in zip(drawing, drawn, strict=True)}
        return [LogitsNotFinite() if id(row) in spoilt else results.get(id(row), ()) for row in rows]

    def _copy_states(
        self, source: abc.Sequence[abc.Sequence[int]], target: abc.Sequence[abc.Sequence[int]]
    ) -> None:
        """Copy the states in the pages of `source` to those of `target`, by KV group, if both have any."""
        for cache, pages, others in zip(self.caches, source, target, strict=False):
            if cache.group.is_state and pages and others:
                cache.tensor[others[0]].copy_(cache.tensor[pages[0]])

    def _score(
        self, rows: abc.Sequence[Row], logits: torch.Tensor | None
    ) -> tuple[frozenset[int], torch.Tensor | None]:
        """Extend the prompt log-probabilities of `rows`.

        Returns the `id`s of rows whose scores are not finite, and the logits of the rows that sample.
        """
        scored = [row for row in rows if row.scored]
        if not scored:
            return frozenset(), logits
        own_logits: list[torch.Tensor] = []
        if logits is not None:
            parts, counts = (
                torch.split(logits, [len(row.wanted) for row in rows]),
                [len(row.scored) for row in rows],
            )
            own_logits = [part[:count] for part, count in zip(parts, counts, strict=True) if count]
            logits = torch.cat([part[count:] for part, count in zip(parts, counts, strict=True)])
        numbers = broadcast_scores(self._rank_group, self._drawer, own_logits, scored, self.vocab_size)
        return frozenset(id(row) for row, well in zip(scored, numbers, strict=True) if not well), logits

    def _wait(self) -> None:
        """Wait until the GPU has finished, so that the step writes to no page any more."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self, sequence: Sequence) -> None:
        if self.draft_pages is not None and sequence.proposal is not None:
            self.draft_pages.release(sequence.proposal)
        self.runner.release(sequence)

    @_device_loss()
    def sum_pages(self, parts: abc.Sequence[PageSumRequest]) -> None:
        if self._flush is not None:
            self._flush()
        self._sum_up(parts)

    def _summed_stop(self, row: Row) -> int:
        """Return the token position up to which a row's pages are included in the checksum.

        If pages are in an engine's own encoding, a page to which later rows of the prompt write is left out.
        """
        if row.sample or all(cache.group.is_state or cache.group.encoding == PLAIN for cache in self.caches):
            return row.stop
        return row.stop // self.layout.block_tokens * self.layout.block_tokens

    def _sum_up(self, parts: abc.Sequence[PageSumRequest]) -> None:
        for part in parts:
            if part.sum.stop >= part.stop:
                continue
            summed: dict[GroupHead, int] = {}
            for number, (group, summer) in enumerate(zip(self.layout.groups, self._summers, strict=True)):
                start, stop = (0, int(part.ends)) if group.is_state else (part.sum.stop, part.stop)
                by_head = summer.by_head(part.tables[number], start, stop)
                summed |= {(number, head): value for head, value in by_head.items()}
            part.sum.add(summed, part.stop)

    def start(self) -> None:
        """Have all memory provided, run first steps, and read the vocabulary of grammars. Blocks.

        Raises StartupError as `warm_up` does.
        """
        for cache in self.caches:
            cache.populate()
        self.warm_up()
        if self.grammars is not None:
            self.grammars.warm_up()

    def warm_up(self) -> None:
        """Run a prompt and one more token as test steps, so that everything is loaded and allocated.

        It uses the first pages, before any is in use. Raises StartupError for a model whose logits are not
        finite.
        """
        capacity = min(self.context_length, *(cache.tokens for cache in self.caches))
        prompt = min(WARM_UP_TOKENS, capacity)
        sequence = Sequence(Request("warm-up", prompt=(0,) * prompt, max_tokens=2), [])
        tables = [range(count) for count in self.layout.pages_for(min(prompt + 1, capacity))]
        [drawn] = self.step([Row(sequence, 0, prompt, tables, sample=True)])
        if isinstance(drawn, LogitsNotFinite):
            raise StartupError(f"{drawn}: its weights are damaged, or --dtype does not hold them")
        if prompt < capacity:
            sequence.output.append(0)
            self.step([Row(sequence, prompt, prompt + 1, tables, sample=True)])
        self.release(sequence)

    def prepare(self, rows: abc.Sequence[Row]) -> None:
        """Prepare the pages of `rows` before the runner computes. Does nothing here. Engines override it if
        they need it."""

    def _check_ids(self, row: Row) -> None:
        for token in row.fed:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"{row.sequence.request.request_id}: token id {token} of a vocabulary of "
                    f"{self.vocab_size}"
                )


def drawing_rank(rank_group: Collectives) -> int:
    """Return the rank that samples tokens: the first tensor-parallel rank of the last pipeline stage."""
    return rank_group.topology.ranks - rank_group.topology.tensor
