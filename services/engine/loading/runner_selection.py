"""Choice of the execution of a model: the fastest one that agrees with the transformers implementation.

Both compute the same small steps while the model is loaded: a prompt, a chunk of it together with another
prompt, and, at the end of the context, a token of each. The logits have to agree, and so do the keys and
values in the pages, since another worker may continue with them. If they do not, the library computes, and
the log gives the reason. For the comparison the implementation computes in float32. It also computes in the
model's own format, which shows the effect of rounding.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch

from baton.engine.execution.agreement import TOLERANCES, relative_difference
from baton.engine.execution.batched_runner import BatchedExecution
from baton.engine.execution.compiled_step import (
    CompiledExecution,
    CompiledModel,
    CompiledRunner,
    KernelFor,
    UnsupportedShapes,
    check,
    fits_bfloat16,
)
from baton.engine.execution.execution import Execution
from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.execution.fused_decoder import FusedDecoder
from baton.engine.execution.model_structure import UnknownStructure
from baton.engine.execution.paged_attention import PagedAttention
from baton.engine.execution.row_by_row import RowByRowExecution
from baton.engine.execution.step_compiler import CODES, KernelUnavailable, supported_builds
from baton.engine.kv_cache import PagedKvCache
from baton.engine.loading.library_model import LibraryModel
from baton.engine.loading.state_batching import batch_states
from baton.engine_interface import Row, Sequence
from baton.inference.kv_memory import DTYPES
from baton.models.model_facts import UnsupportedModel
from baton.pages.layout import KvGroup, KvLayout
from baton.rooms.request import Request
from baton.runtime.errors import StartupError, describe_error
from baton.runtime.logging import Log

log = Log(__name__)

QUANTIZED_TOLERANCES: Final = {**TOLERANCES, "bfloat16": 0.03}
"""Largest accepted relative difference of a compiled step with quantized weights, by number format. It
multiplies in float32, so less is accepted."""
ROUNDINGS: Final = 2
"""Factor of the tolerance for rounding, which applies if it exceeds the fixed tolerance.

Our result may differ from the exact one by this many times the error that rounding to the model's number
format causes in the transformers implementation.
"""
EXACT: Final = "float32"
FAILURES: Final = (RuntimeError, ValueError, TypeError, LookupError)
"""Classes of the errors that an execution raises if it cannot compute the model on this machine."""
PAGE_TOKENS_MAX: Final = 16
LONG: Final = 28
STEPS: Final = (((0, 19),), ((19, 26), (0, 4)), ((26, 27), (4, 5)), ((27, 28), (5, 6)))
"""Token positions [start, stop) that each test step computes. The first pair is of the long test sequence, a
second pair is of the short one."""
MORE: Final = 32
"""Tokens by which the long test sequence is longer if a layer has a window, so that its first tokens lie
outside every window."""
NARROW: Final = 11
"""Tokens to which wider attention windows are narrowed in the comparison, so that some tokens attend to only
a part of the test sequence."""
EARLY: Final = 2
"""Number of test steps whose tokens are computed at their own positions, from 0 on.

In later steps the positions are shifted to the end of the context, but tokens attend to no more tokens than
there are.
"""


@dataclass(frozen=True, slots=True)
class Reference:
    """Results of the test steps by the transformers implementation, which a faster execution has to
    reproduce."""

    answers: list[torch.Tensor]
    tolerance: float
    """Largest accepted relative difference between the results of an execution and `answers`."""


def library_execution(model: LibraryModel) -> Execution:
    """Return the execution by the transformers implementation, row by row if the model needs that."""
    if model.definition is not None:
        return RowByRowExecution(model.definition, model.geometry, model.vocab_size, model.weight_bytes)
    states = model.geometry.state_tensors
    return BatchedExecution(
        ExecutionKind.LIBRARY, model.logits, model.spans, model.weight_bytes, states=states
    )


def select_execution(model: LibraryModel, layout: KvLayout, kernel_for: KernelFor | None = None) -> Execution:
    """Return the fastest execution of `model` that agrees with the transformers implementation.

    `kernel_for`: returns a compiled step. None if steps are not to be compiled. An execution of our own takes
    the weights from `model`. Raises UnsupportedModel if the implementation itself does not compute over our
    pages, and StartupError if no execution can multiply the model's quantized weights.
    """
    least = LONG + (MORE if model.spans else 0)
    if model.definition is not None:
        batch_states(model, layout)
        return library_execution(model)
    if model.facts.context_length < least:
        if model.quantized is not None:
            raise _not_multiplied(layout, f"a context of fewer than {least} tokens")
        return library_execution(model)
    (kv,) = layout.groups
    library = library_execution(model)
    defined = [] if model.quantized is not None else _library_answers(model, library, kv)
    try:
        reference = _reference(model, kv, defined)
        if kernel_for is not None:
            compiled = _compiled(model, layout, reference, kernel_for)
            if compiled is not None:
                return compiled
        fused, why = _fused(model, layout, reference)
    except UnknownStructure as other:
        if model.quantized is not None:
            raise _not_multiplied(layout, str(other)) from other
        log.info("the model library computes the steps: other parts than ours", found=str(other))
        return library
    if fused is None:
        log.warning("the model library computes the steps: ours are not the same", why=why)
        return library_execution(model)
    return fused


def _library_answers(model: LibraryModel, library: Execution, kv: KvGroup) -> list[torch.Tensor]:
    """Return the results of the test steps as the transformers implementation computes them over our pages.
    Raises UnsupportedModel."""
    try:
        return comparison_results(model, library, kv)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise UnsupportedModel(
            f"the model {model.facts.name} cannot be served: its definition computes no step here "
            f"({describe_error(error)})"
        ) from error


def _reference(model: LibraryModel, kv: KvGroup, defined: list[torch.Tensor]) -> Reference:
    """Return the test steps' results by the transformers implementation in float32, the reference for faster
    executions.

    Only keys and values are rounded, as pages store them. `defined`: the implementation's results in the
    model's own format. Raises UnknownStructure.
    """
    if model.dtype == EXACT and model.quantized is None:
        return Reference(defined, TOLERANCES[EXACT])
    model.structure()
    rounded = partial(_rounded, model, DTYPES[kv.dtype])
    exact = BatchedExecution(ExecutionKind.LIBRARY, rounded, model.spans, model.weight_bytes)
    try:
        with model.exactly():
            answers = comparison_results(model, exact, replace(kv, dtype=EXACT))
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise UnknownStructure(f"parts that compute nothing in float32 ({describe_error(error)})") from error
    if model.quantized is not None:
        return Reference(answers, QUANTIZED_TOLERANCES[model.dtype])
    rounding = max(map(relative_difference, defined, answers))
    return Reference(answers, max(TOLERANCES[model.dtype], ROUNDINGS * rounding))


def _compiled(
    model: LibraryModel, layout: KvLayout, reference: Reference, kernel_for: KernelFor
) -> Execution | None:
    """Return the execution by a compiled step, or None if it cannot be used. Raises UnknownStructure."""
    try:
        execution, why = _verified(model, layout, reference, kernel_for)
    except (UnsupportedShapes, KernelUnavailable) as other:
        if model.quantized is not None:
            raise _not_multiplied(layout, str(other)) from other
        log.info("steps are not compiled", why=str(other))
        return None
    if execution is None:
        log.warning("steps are not compiled", why=why)
    return execution


def _fused(model: LibraryModel, layout: KvLayout, reference: Reference) -> tuple[Execution | None, str]:
    """Return the execution by our fused decoder, or None and the reason. Raises UnknownStructure."""
    return _verified(model, layout, reference, None)


def _verified(
    model: LibraryModel, layout: KvLayout, reference: Reference, kernel_for: KernelFor | None
) -> tuple[Execution | None, str]:
    """Return the fused or compiled execution if its results agree with `reference`, or None and the reason.

    `kernel_for`: returns a compiled step, or None for the fused decoder. Without agreement `model` has its
    weights again. Raises UnknownStructure, UnsupportedShapes and KernelUnavailable, and then nothing has
    changed.
    """
    execution: Execution | None = None
    try:
        (kv,) = layout.groups
        if kernel_for is None:
            execution = _make_fused(model)
        else:
            execution = _make_compiled(model, kv.page_tokens, kernel_for)
        differences = [*map(relative_difference, comparison_results(model, execution, kv), reference.answers)]
        close = all(each <= reference.tolerance for each in differences)
        why = "" if close else f"results differ by {max(differences):.2g} of their length"
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        why = f"{type(error).__name__}: {error}"
    if not why:
        return execution, ""
    if model.quantized is not None:
        raise _not_multiplied(layout, why)
    del execution  # so that weights are not in memory twice
    model.reload()
    return None, why


def _make_fused(model: LibraryModel) -> Execution:
    """Return an execution by our fused decoder, which takes the model's weights. Raises UnknownStructure."""
    structure = model.structure()
    model.release()
    with torch.inference_mode():
        decoder = FusedDecoder(structure, model.geometry.head_dim)

    def compute(
        tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        with torch.inference_mode():
            return decoder.logits(tokens, positions, keep, attention)

    return BatchedExecution(ExecutionKind.FUSED, compute, model.spans, model.weight_bytes, decoder)


def _make_compiled(model: LibraryModel, page_tokens: int, kernel_for: KernelFor) -> Execution:
    """Return an execution by a compiled step, which takes the model's weights.

    Raises UnknownStructure, UnsupportedShapes or KernelUnavailable, and then nothing has changed.
    """
    structure = model.structure()
    numbers = check(structure, model.geometry.head_dim, page_tokens, model.spans.values())
    supported_builds(numbers)  # raises before all weights are read
    weights = CODES
    if model.quantized is None:
        weights = torch.bfloat16 if fits_bfloat16(structure.linears) else torch.float32
    kernel = kernel_for(numbers, weights)
    model.release()
    with torch.inference_mode():
        compiled = CompiledModel(structure, model.geometry.head_dim, kernel, model.quantized)
    return CompiledExecution(compiled, model.spans)


def _not_multiplied(layout: KvLayout, why: str) -> StartupError:
    return StartupError(
        f"--quantize {layout.quantize}: codes are multiplied by compiled steps alone, which are not there: "
        f"{why}; leave out --quantize"
    )


def comparison_results(model: LibraryModel, execution: Execution, kv: KvGroup) -> list[torch.Tensor]:
    """Compute the test steps, and return the logits of all positions and then the contents of the pages.

    A compiled step computes the last positions by themselves, too. `kv`: KV group of the pages.
    """
    numbers = torch.Generator().manual_seed(7)
    more = MORE if model.spans else 0
    prompts = torch.randint(model.vocab_size, (2, LONG + more), generator=numbers).tolist()
    sequences = [Sequence(Request("proof", tuple(prompt), 1), []) for prompt in prompts]
    kv = replace(kv, page_tokens=min(kv.page_tokens, PAGE_TOKENS_MAX))
    pages = kv.pages_for(LONG + more)
    cache = PagedKvCache(kv, 2 * pages, model.device)
    cache.tensor.zero_()
    tables = torch.randperm(2 * pages, generator=numbers).view(2, pages).tolist()
    spans = {layer: span.narrowed(NARROW) for layer, span in model.spans.items()}
    runner: CompiledRunner | None = None
    if isinstance(execution, CompiledExecution):
        runner = execution.runner_with(cache, spans)
    answers: list[torch.Tensor] = []
    for index, ((start, stop), *short) in enumerate(STEPS):
        later = model.facts.context_length - LONG - more if index >= EARLY else 0
        bounds = [(start + more if start else 0, stop + more), *short]
        rows = [
            Row(sequence, *each, (table,), sample=False)
            for sequence, each, table in zip(sequences, bounds, tables, strict=False)
        ]
        logits: torch.Tensor | None
        with torch.inference_mode():
            if runner is not None:
                logits = _compiled_logits(runner, rows, later)
            elif isinstance(execution, BatchedExecution):
                steps = execution.runner_with([cache], spans)
                logits = steps.logits_at(rows, everywhere=True, later=later)
            else:
                raise AssertionError(f"an execution {execution.kind} is not compared")
        if logits is not None:
            answers.append(logits.float())
    return [*answers, cache.tensor.float()]


def _compiled_logits(runner: CompiledRunner, rows: list[Row], later: int) -> torch.Tensor:
    everywhere = runner.logits_at(rows, everywhere=True, later=later)
    ends = [end - 1 for end in accumulate(row.stop - row.start for row in rows)]
    everywhere[ends] = runner.logits_at([replace(row, sample=True) for row in rows], later=later)
    return everywhere


def _rounded(
    model: LibraryModel,
    kept_in: torch.dtype,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    keep: torch.Tensor,
    attention: PagedAttention,
) -> torch.Tensor | None:
    """Return the logits of the transformers implementation if keys and values are rounded to `kept_in`, the
    dtype of the pages, before they are stored."""

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        key, value = (each.to(kept_in).to(each.dtype) for each in (key, value))
        return attention(module, query, key, value, options)

    return model.logits(tokens, positions, keep, attend)
