"""How is a step computed with torch, and how does a model come to be computed so?"""

from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from baton.engine.device import bind_thread, find_device, find_dtype
from baton.engine.execution.compiled_step import CompiledSteps
from baton.engine.execution.cuda_graphs import RecordedSteps, recorded_steps
from baton.engine.execution.flash_kernels import find_kernel, proven
from baton.engine.execution.kept import DecodeWorkspace
from baton.engine.execution.paged_attention import PagedAttention
from baton.engine.execution.paged_rows import PagedKernel
from baton.engine.execution.row_by_row import RowSteps
from baton.engine.execution.step_compiler import kernel as compiled_kernel
from baton.engine.execution.step_plan import make_plan
from baton.engine.kv_cache import PagedKvCache, pages_that_fit
from baton.engine.loading.library_model import Model, load_model
from baton.engine.loading.runner_selection import select_execution
from baton.engine.notes import notes_of
from baton.engine.page_checksum import PageSummer
from baton.engine.quantization.weight_quantization import WeightQuantization
from baton.engine.ranks.collectives import Team, alone
from baton.engine.ranks.sampled_results import add_page_sums, broadcast_scores, draw
from baton.engine.remote_writes import flush_for
from baton.engine_interface import (
    EngineLost,
    LogitsNotFinite,
    PageSumRequest,
    RankGroupBroken,
    Row,
    RowResult,
    Sequence,
    check,
)
from baton.grammars.shelf import Shelf
from baton.grammars.vocabulary import read_vocabulary
from baton.pages.layout import KvLayout, full_group
from baton.pages.ranks import rank_layout
from baton.rooms.request import Request
from baton.runtime.errors import StartupError
from baton.runtime.model_options import LoadFormat, Quantize
from baton.sampling.draft_model import DraftModel
from baton.sampling.draft_rows import apart
from baton.sampling.prompt_scores import BESIDE_BYTES, scored_at_once
from baton.sampling.proposer import Proposer
from baton.topology import Topology

WARM_UP_TOKENS: Final = 64


@contextmanager
def _device_loss() -> Iterator[None]:
    """Raises EngineLost where the device is lost."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise EngineLost(f"{type(error).__name__}: {error}") from error


class TorchEngine:
    """An `Engine` of `interface.py`."""

    def __init__(
        self,
        model: Model,
        whole: KvLayout,
        cache: PagedKvCache,
        team: Team,
        batch_memory: int = 0,
        recorded: RecordedSteps | None = None,
        compiled: CompiledSteps | None = None,
        by_row: RowSteps | None = None,
        kernel: PagedKernel | None = None,
        flush: Callable[[], None] | None = None,
        grammars: Shelf | None = None,
    ) -> None:
        """`recorded`: steps that are recorded by `warm_up`, and replayed from then on. `compiled`:
        computes all steps instead; so does `by_row`. `kernel`: looks at the pages where they lie. `flush`: is
        called before pages are looked at that others may have written. `grammars`: what the answers are held
        to that this rank draws."""
        self.model = model
        self.vocab_size = model.vocab_size
        self.context_length = model.facts.context_length
        self.whole = whole
        self.layout = rank_layout(whole, team.topology, team.rank)
        self.cache = cache
        self.caches = (cache,)
        self._team = team
        self._drawer = drawing_rank(team)
        self._summers = [PageSummer(cache)]
        self._proposer = Proposer(team, self._drawer)
        self._kept = DecodeWorkspace(cache, batch_memory) if batch_memory else None
        self.recorded = recorded
        self.compiled = compiled
        self.by_row = by_row
        self.kernel = kernel
        self._flush = flush
        self.grammars = grammars
        self.draft_pages: DraftModel | None = None
        self.scored_max = scored_at_once(model.vocab_size)

    @property
    def draws(self) -> bool:
        """This rank draws."""
        return self._team.rank == self._drawer

    def draft_with(self, model: DraftModel) -> None:
        """Sequences that want it have drafts of `model` proposed. Before the first step, on the rank that
        draws."""
        self.draft_pages = model
        self._proposer = Proposer(self._team, self._drawer, model)

    def bind_thread(self) -> None:
        # Until it asks for the number that was set, a thread computes with as many as the process began with.
        torch.get_num_threads()
        bind_thread(self.cache.device)

    @_device_loss()
    def step(self, rows: abc.Sequence[Row]) -> list[RowResult]:
        for row in rows:
            check(row, self.cache.group.page_tokens, self.cache.pages, self.context_length)
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
            if self._team.topology.ranks == 1:
                self._wait()  # its rooms give their pages back
                raise
            raise self._team.leave(f"{type(error).__name__}: {error}") from error

    def _step(self, rows: abc.Sequence[Row]) -> list[RowResult]:
        taken, spoilt = self._computed(rows)
        if spoilt:  # perhaps by their drafts, which a mask hides: zero times NaN is NaN
            again, _ = self._computed([replace(rows[place], drafts=()) for place in spoilt])
            for place, each in zip(spoilt, again, strict=True):
                taken[place] = each
        self._sum_up(
            [
                PageSumRequest(row.sequence.page_sum, row.tables, row.stop)
                for row in rows
                if row.sequence.page_sum
            ]
        )
        summed = [row.sequence.page_sum for row in rows if row.sample]
        add_page_sums(self._team, self.whole, [each for each in summed if each])
        self._proposer.propose(rows, taken)
        return taken

    def _computed(self, rows: abc.Sequence[Row]) -> tuple[list[RowResult], list[int]]:
        """What comes of `rows`, and which of them have drafts and logits that are no numbers."""
        well = False
        try:
            taken = self._compute(rows)
            outcomes = enumerate(zip(rows, taken, strict=True))
            spoilt = [
                place for place, (row, each) in outcomes if row.drafts and isinstance(each, LogitsNotFinite)
            ]
            well = not spoilt
        finally:
            if self._kept is not None:
                self._kept.ended(well=well)
        return taken, spoilt

    def _compute(self, rows: abc.Sequence[Row]) -> list[RowResult]:
        if self._flush is not None:
            self._flush()
        for row in rows:
            self._clear_tail(row)
        drawing = [row for row in rows if row.sample]
        with torch.inference_mode():
            logits = self._logits(rows)
            spoilt, logits = self._score(rows, logits)
            drawn = draw(self._team, self._drawer, logits, drawing, self.vocab_size)
            self._wait()
        told: dict[int, RowResult] = {id(row): each for row, each in zip(drawing, drawn, strict=True)}
        return [LogitsNotFinite() if id(row) in spoilt else told.get(id(row), ()) for row in rows]

    def _score(
        self, rows: abc.Sequence[Row], logits: torch.Tensor | None
    ) -> tuple[frozenset[int], torch.Tensor | None]:
        """Carry the scores of `rows` on, where they have some. Which rows, by `id`, have logits that are no
        numbers, and the logits of those that sample."""
        scored = [row for row in rows if row.scored]
        if not scored:
            return frozenset(), logits
        mine: list[torch.Tensor] = []
        if logits is not None:
            parts, counts = (
                torch.split(logits, [len(row.wanted) for row in rows]),
                [len(row.scored) for row in rows],
            )
            mine = [part[:count] for part, count in zip(parts, counts, strict=True) if count]
            logits = torch.cat([part[count:] for part, count in zip(parts, counts, strict=True)])
        numbers = broadcast_scores(self._team, self._drawer, mine, scored, self.vocab_size)
        return frozenset(id(row) for row, well in zip(scored, numbers, strict=True) if not well), logits

    def _wait(self) -> None:
        """Until a GPU has done all that was asked of it: nothing of the step writes to its pages any more."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def _logits(self, rows: abc.Sequence[Row]) -> torch.Tensor | None:
        if self.by_row is not None:
            return self.by_row.logits(rows)
        rows = apart(rows)
        if self.compiled is not None:
            return self.compiled.logits(rows)
        replayed = None if self.recorded is None else self.recorded.logits(rows)
        if replayed is not None:
            return replayed
        plan = make_plan(rows, self.cache, self.model.device, self._kept, self.kernel)
        step = PagedAttention(plan, self.cache, self.model.reaches)
        return self.model.compute(plan.tokens, plan.positions, plan.keep, step)

    @_device_loss()
    def sum_pages(self, parts: abc.Sequence[PageSumRequest]) -> None:
        if self._flush is not None:
            self._flush()
        self._sum_up(parts)

    def _sum_up(self, parts: abc.Sequence[PageSumRequest]) -> None:
        for part in parts:
            if part.sum.stop < part.stop:
                summed = {
                    (group, head): value
                    for group, (summer, table) in enumerate(zip(self._summers, part.tables, strict=True))
                    for head, value in summer.by_head(table, part.sum.stop, part.stop).items()
                }
                part.sum.add(summed, part.stop)

    def warm_up(self) -> None:
        """Run a prompt and a token through the first pages, and record what is to be replayed, so that the
        first request finds everything loaded and allocated. Before any page is in use. Raises StartupError
        for a model that computes no numbers."""
        capacity = min(self.cache.tokens, self.context_length)
        prompt = min(WARM_UP_TOKENS, capacity)
        sequence = Sequence(Request("warm-up", prompt=(0,) * prompt, max_tokens=2), [])
        pages = range(self.cache.group.pages_for(min(prompt + 1, capacity)))
        [drawn] = self.step([Row(sequence, 0, prompt, (pages,), sample=True)])
        if isinstance(drawn, LogitsNotFinite):
            raise StartupError(f"{drawn}: its weights are damaged, or --dtype does not hold them")
        if prompt < capacity:
            sequence.output.append(0)
            self.step([Row(sequence, prompt, prompt + 1, (pages,), sample=True)])
        if self.recorded is not None:
            self.recorded.record_all()

    def _check_ids(self, row: Row) -> None:
        for token in row.fed:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"{row.sequence.request.request_id}: token id {token} of a vocabulary of "
                    f"{self.vocab_size}"
                )

    def _clear_tail(self, row: Row) -> None:
        """Zero the unused end of the row's last page, unless this sequence had it zeroed before. A row with
        drafts may leave there what is not taken."""
        size = self.cache.group.page_tokens
        index, used = (row.end - 1) // size, (row.end - 1) % size + 1
        page = row.pages[index]
        entered = row.start <= index * size
        notes = notes_of(row.sequence)
        if used < size and (entered or notes.tail_page != page):
            self.cache.clear_tail(page, used)
        notes.tail_page = -1 if row.drafts else page


def drawing_rank(team: Team) -> int:
    """The rank that draws: the first tensor rank of the last stage."""
    return team.topology.ranks - team.topology.tensor


def load_engine(
    directory: Path,
    *,
    dtype: str = "auto",
    load_format: LoadFormat = LoadFormat.AUTO,
    context_length: int = 0,
    coding: WeightQuantization | None = None,
    device: str = "auto",
    page_tokens: int = 16,
    kv_cache_memory: int = 2**30,
    tokens_min: int = 1,
    threads: int = 1,
    batch_memory: int = 0,
    scores_prompts: bool = False,
    cuda_graphs: int = 0,
    compiled: bool = False,
    flash_attention: bool = False,
    topology: Topology | None = None,
    rank: int = 0,
    team: Team | None = None,
) -> TorchEngine:
    """Load the model in `directory`, or this rank's share of it, and take `kv_cache_memory` bytes at most for
    its pages: as many on every rank, and together enough for `tokens_min` tokens.

    `topology`, `rank`: of the worker, with the `team` that joins its ranks where there are several. `dtype`:
    "auto", "bfloat16" or "float32", of weights and pages alike. `load_format`: which weights.
    `context_length`: most tokens of a sequence; 0 for what the model's configuration says. `coding`: have
    weights kept as codes, where one rank has the whole model; those that multiply them do it `compiled`, on a
    CPU. `device`: "auto", "cpu" or "cuda[:N]". `threads`: of the CPU's tensor operations, for the whole
    process. `batch_memory`: bytes beside the pages in which the running batch's keys and values may lie
    side by side, on a CPU. `scores_prompts`: see to it that there is memory for the logits of prompts that
    are scored. `cuda_graphs`: rows of the largest decode step that `warm_up` records to be replayed, on a
    GPU, where one rank has the whole model. `compiled`: have steps computed by one call, on a CPU, where it
    can be compiled. `flash_attention`: have its kernels look at the pages, on a GPU, where they are
    installed. Raises StartupError: a missing, damaged or unsupported model, one that so many ranks cannot
    share, a device that is not there, too little memory.
    """
    torch.set_num_threads(threads)
    team = alone() if team is None else team
    if (team.topology, team.rank) != (topology or Topology(), rank):
        raise ValueError(f"rank {rank} of {topology} with a team of rank {team.rank} of {team.topology}")
    place = find_device(device, team.rank)
    dtype = find_dtype(dtype, place, team)
    if coding is not None:
        _check_coding(coding, place, team, compiled=compiled)
    # Before the model is: what its other attention is computed by from then on is proven with it.
    kernel = find_kernel(place, dtype) if flash_attention and place.type == "cuda" else None
    model = load_model(directory, dtype, device, team, load_format, context_length, coding)
    geometry = model.geometry
    layers, heads = tuple(range(geometry.layers)), tuple(range(geometry.kv_heads))
    whole = KvLayout(
        model=model.facts.fingerprint,
        groups=(full_group(dtype, page_tokens, layers, heads, geometry.head_dim),),
        context_length=model.facts.context_length,
        quantize=(Quantize.NONE if coding is None else coding.how).value,
    )
    layout = rank_layout(whole, team.topology, team.rank)
    if team.topology.ranks == 1 and not model.by_row:
        select_execution(model, layout, compiled_kernel if compiled and model.device.type == "cpu" else None)
    (kv,) = layout.groups
    pages = team.least(pages_that_fit(kv, kv_cache_memory, tokens_min))
    kernel = None if model.by_row else kernel
    beside = batch_memory if model.device.type == "cpu" and not (model.compiled or model.by_row) else 0
    scores = BESIDE_BYTES if scores_prompts else 0
    cache = PagedKvCache(kv, pages, model.device, beside + scores)
    if kernel is not None:
        kernel = proven(kernel, geometry.query_heads // team.topology.tensor, cache, model.sights)
    recorded = recorded_steps(model, cache, cuda_graphs, kernel)
    return TorchEngine(
        model,
        whole,
        cache,
        team,
        beside,
        recorded,
        model.compiled_steps(cache),
        model.row_steps(cache),
        kernel,
        flush_for(model.device),
        Shelf(partial(read_vocabulary, directory, model.facts)) if team.rank == drawing_rank(team) else None,
    )


def load_beside(engine: TorchEngine, kv_cache_memory: int, tokens_min: int = 1) -> TorchEngine:
    """Another engine over the same weights, for prompts, with pages of its own: one of the two makes a step
    at a time. Takes `kv_cache_memory` bytes at most. Raises NotEnoughMemory."""
    (kv,) = engine.layout.groups
    model = engine.model
    cache = PagedKvCache(kv, pages_that_fit(kv, kv_cache_memory, tokens_min), model.device)
    return TorchEngine(
        model,
        engine.whole,
        cache,
        alone(),
        compiled=model.compiled_steps(cache),
        by_row=model.row_steps(cache),
        kernel=engine.kernel,
        flush=flush_for(model.device),
        grammars=engine.grammars,
    )


def _check_coding(coding: WeightQuantization, place: torch.device, team: Team, *, compiled: bool) -> None:
    """Raises StartupError where nothing computes so."""
    if coding.how is Quantize.KEEP and coding.gguf is None:
        raise StartupError(
            f"{coding}: the model is no GGUF file, whose blocks would be kept: give int8 or int4"
        )
    if team.topology.ranks > 1:
        raise StartupError(
            f"{coding}: the ranks of a group compute over plain weights; leave one of them out"
        )
    if coding.multiplied and place.type != "cpu":
        raise StartupError(f"{coding}: codes are multiplied on CPUs alone, and --device is {place}: give cpu")
    if coding.multiplied and not compiled:
        raise StartupError(
            f"{coding}: codes are multiplied by compiled steps alone: leave out --compiled-steps false"
        )
