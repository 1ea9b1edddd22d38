"""Check whether a model whose layers have states can compute the rows of several sequences together.

Small steps of three sequences are computed row by row and together: a prompt, a chunk of it beside other
prompts, then one token of each. The logits, the pages of keys and values, and the states have to agree.
Otherwise the rows are computed one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import torch

from baton.engine.execution.agreement import TOLERANCES, relative_difference
from baton.engine.execution.batched_runner import BatchedExecution
from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.execution.row_by_row import LibraryDefinition, PagedRow
from baton.engine.execution.state_mixers import UnknownMixer
from baton.engine.execution.step_plan import divide_rows
from baton.engine.kv_cache import EngineCache, make_cache
from baton.engine.loading.library_model import LibraryModel
from baton.engine.loading.row_by_row_probe import CONTINUED
from baton.engine.loading.state_probe import refuse_by_ranks
from baton.engine_interface import Row
from baton.engine_interface import Sequence as TokenSequence
from baton.models.model_facts import UnsupportedModel
from baton.pages.layout import KvGroup, KvLayout
from baton.pages.rank_layout import rank_layout
from baton.rooms.request import Request
from baton.runtime.errors import describe_error
from baton.runtime.logging import Log
from baton.topology import Topology

log = Log(__name__)

Step: TypeAlias = tuple[tuple[int, int], ...]
STEPS: Final[tuple[Step, ...]] = (
    ((0, 19),),
    ((19, 26), (0, 4)),
    ((26, 27), (4, 5), (0, 1)),
    ((27, 28), (5, 6), (1, 2)),
    ((28, 29), (6, 9), (2, 3)),
)
"""Token positions [start, stop) of each test sequence that each test step computes."""
WHOLE: Final[tuple[Step, ...]] = (((0, 29), (0, 9), (0, 3)),)
"""The same positions, with each sequence at once."""
SEQUENCES: Final = 3
LONG: Final = 29
PAGE_TOKENS_MAX: Final = 16
TOGETHER: Final = "states that it does not continue for several sequences at once"
FAILURES: Final = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""Classes of the errors with which rows cannot be computed together."""

StepLogits: TypeAlias = Callable[[Sequence[Row], Sequence[EngineCache]], torch.Tensor | None]
"""Function (rows, caches) that computes a step, and returns the logits of all positions in the batch."""


def batch_states(model: LibraryModel, layout: KvLayout) -> None:
    """Make `model`, which computes row by row, compute rows together if its results are then the same."""
    definition = model.definition
    if definition is None or not model.geometry.states or model.facts.context_length < LONG:
        return
    one_by_one = _row_by_row(model, definition)
    expected = step_results(model, layout.groups, one_by_one)
    try:
        model.batch_rows()
        found = step_results(model, layout.groups, rows_together(model))
        differences = [*map(relative_difference, found, expected)]
        close = all(each <= TOLERANCES[model.dtype] for each in differences)
        why = "" if close else f"results differ by {max(differences):.2g} of their length"
    except torch.OutOfMemoryError:
        raise
    except (UnknownMixer, UnsupportedModel, *FAILURES) as error:
        why = describe_error(error)
    if why:
        model.compute_row_by_row()
        log.info("each row of a step is computed by itself", why=why)
    else:
        model.definition = None


def check_rank_states(model: LibraryModel, topology: Topology, rank: int) -> None:
    """Check that this rank's part of a model with states computes each row as if it were alone, and in
    chunks.

    Exchanges nothing with other ranks. Raises UnsupportedModel.
    """
    facts = model.facts
    if facts.context_length < LONG:
        refuse_by_ranks(facts.name, model.module, f"a context of {LONG} tokens")
    groups = model.geometry.groups(model.dtype, PAGE_TOKENS_MAX, facts.context_length)
    layout = rank_layout(KvLayout(facts.fingerprint, groups), topology, rank)
    together = rows_together(model)

    def alone(rows: Sequence[Row], caches: Sequence[EngineCache]) -> torch.Tensor | None:
        single, longer = divide_rows(rows)
        logits = [each for row in (*single, *longer) if (each := together([row], caches)) is not None]
        return torch.cat(logits) if logits else None

    with model.unlinked():
        found, expected = (step_results(model, layout.groups, each) for each in (together, alone))
        whole = step_results(model, layout.groups, together, WHOLE)
    tolerance = TOLERANCES[model.dtype]
    if not _agree(found, expected, tolerance):
        refuse_by_ranks(facts.name, model.module, TOGETHER)
    pages = len(layout.groups)
    if not _agree(found[-pages:], whole[-pages:], tolerance):
        refuse_by_ranks(facts.name, model.module, CONTINUED)


def _agree(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float) -> bool:
    pairs = [pair for pair in zip(found, expected, strict=True) if pair[0].numel()]
    return all(relative_difference(*pair) <= tolerance for pair in pairs)


def rows_together(model: LibraryModel) -> StepLogits:
    """Return a function that computes the rows of a step together."""
    execution = BatchedExecution(
        ExecutionKind.LIBRARY,
        model.logits,
        model.spans,
        model.weight_bytes,
        states=model.geometry.state_tensors,
    )
    return lambda rows, caches: execution.runner(caches).logits_at(rows, everywhere=True)


def _row_by_row(model: LibraryModel, definition: LibraryDefinition) -> StepLogits:
    tensors = model.geometry.state_tensors

    def compute(rows: Sequence[Row], caches: Sequence[EngineCache]) -> torch.Tensor:
        single, longer = divide_rows(rows)
        logits = []
        for row in (*single, *longer):
            tokens = torch.tensor([row.fed], device=model.device)
            logits.append(definition.logits(tokens, row.start, PagedRow(row, caches, tensors)))
        return torch.cat(logits)

    return compute


def step_results(
    model: LibraryModel, groups: Sequence[KvGroup], compute: StepLogits, steps: Sequence[Step] = STEPS
) -> list[torch.Tensor]:
    """Compute the test steps, and return their logits and then the contents of all pages.

    `groups`: KV groups of this rank. `steps`: token positions of each sequence.
    """
    numbers = torch.Generator().manual_seed(11)
    prompts = torch.randint(model.facts.vocab_size, (SEQUENCES, LONG), generator=numbers).tolist()
    sequences = [TokenSequence(Request("proof", tuple(prompt), 1), []) for prompt in prompts]
    caches, tables = [], []
    for group in groups:
        if not group.is_state:
            group = replace(group, page_tokens=min(group.page_tokens, PAGE_TOKENS_MAX))
        pages = group.pages_for(LONG)
        caches.append(make_cache(group, SEQUENCES * pages, model.device))
        caches[-1].tensor.zero_()
        shuffled = torch.randperm(SEQUENCES * pages, generator=numbers)
        tables.append(shuffled.view(SEQUENCES, pages).tolist())
    answers: list[torch.Tensor] = []
    for step in steps:
        rows = [
            Row(sequence, *bounds, tuple(own), sample=False)
            for sequence, bounds, own in zip(sequences, step, zip(*tables, strict=True), strict=False)
        ]
        with torch.inference_mode():
            logits = compute(rows, caches)
        if logits is not None:
            answers.append(logits.float())
    return [*answers, *(cache.tensor.float() for cache in caches)]
