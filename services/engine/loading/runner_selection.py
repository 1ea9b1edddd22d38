"""Does our own way to compute a model give what the library's definition gives?

Both compute the same small steps as the model is loaded: a prompt, a chunk of it beside another prompt, and,
as far behind them as the context reaches, a token of each. Not only the logits have to agree, but also the
keys and values left in the pages, which another worker may go on with. Where they do not, the library
computes, and a line of the log says why. The definition computes in float32 for that, whatever the model is
in, and as the model is, which tells how far rounding takes it.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch

from baton.engine.execution.compiled_step import KernelFor, UnsupportedShapes
from baton.engine.execution.kept import DecodeWorkspace
from baton.engine.execution.model_structure import UnknownStructure
from baton.engine.execution.paged_attention import PagedAttention
from baton.engine.execution.step_compiler import KernelUnavailable
from baton.engine.execution.step_plan import make_plan
from baton.engine.kv_cache import DTYPES, PagedKvCache
from baton.engine.loading.library_model import Model
from baton.engine_interface import Row, Sequence
from baton.models.model_facts import UnsupportedModel
from baton.pages.layout import KvGroup, KvLayout
from baton.rooms.request import Request
from baton.runtime.errors import StartupError, in_a_line
from baton.runtime.logging import Log

log = Log(__name__)

TOLERANCES: Final = {"float32": 1e-4, "bfloat16": 0.1}
"""Of the difference's length, as a share of the length of what is right."""
OF_CODES: Final = {**TOLERANCES, "bfloat16": 0.03}
"""The same where weights are codes, which are multiplied in float32."""
ROUNDINGS: Final = 2
"""Our own way may be so many times as far away as rounding takes the definition, where that is more."""
EXACT: Final = "float32"
FAILURES: Final = (RuntimeError, ValueError, TypeError, LookupError)
"""What a way raises that does not compute here."""
PAGE_TOKENS_MAX: Final = 16
LONG: Final = 28
STEPS: Final = (((0, 19),), ((19, 26), (0, 4)), ((26, 27), (4, 5)), ((27, 28), (5, 6)))
"""In each step what is computed of the long sequence, and of the short one."""
MORE: Final = 32
"""So much longer is the long one, from its first step on, where a layer has a window: some of its tokens then
lie before all that is looked at."""
NARROW: Final = 11
"""Tokens of the widest windows here: some of the long sequence's see only the last of those before them."""
EARLY: Final = 2
"""So many steps are at the beginning of the context. What the others compute is turned as if it came at its
end, but looks at no more tokens than there are."""


@dataclass(frozen=True, slots=True)
class Right:
    """What our own way has to give."""

    answers: list[torch.Tensor]
    tolerance: float
    """Of each difference's length, as a share of the answer's."""


def select_execution(model: Model, layout: KvLayout, kernel_for: KernelFor | None = None) -> None:
    """Let `model` compute in our own way if it can, and if that is seen to give the same: by a compiled
    kernel, where `kernel_for` has one for it, else by calls. Raises UnsupportedModel where the library's
    definition itself does not compute over our pages."""
    least = LONG + (MORE if model.reaches else 0)
    if model.facts.context_length < least:
        if model.coded:
            raise _uncoded(layout, f"a context of fewer than {least} tokens")
        return
    (kv,) = layout.groups
    defined = [] if model.coded else _defined(model, kv)
    try:
        right = _right(model, kv, defined)
        if kernel_for is not None and _compiles(model, layout, right, kernel_for):
            return
        why = _tried(model, layout, right)
    except UnknownStructure as other:
        if model.coded:
            raise _uncoded(layout, str(other)) from other
        log.info("the model library computes the steps: other parts than ours", found=str(other))
        return
    if why:
        log.warning("the model library computes the steps: ours are not the same", why=why)


def _defined(model: Model, kv: KvGroup) -> list[torch.Tensor]:
    """What the library's definition gives over our pages. Raises UnsupportedModel where it gives nothing."""
    try:
        return _answers(model, kv)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise UnsupportedModel(
            f"the model {model.facts.name} cannot be served: its definition computes no step here "
            f"({in_a_line(error)})"
        ) from error


def _right(model: Model, kv: KvGroup, defined: list[torch.Tensor]) -> Right:
    """In float32, but for what pages hold. `defined`: what the definition gives as the model is, which is
    told by how far rounding takes it. Raises UnknownStructure."""
    if model.dtype == EXACT and not model.coded:
        return Right(defined, TOLERANCES[EXACT])
    model.anatomy()
    try:
        with model.exactly():
            answers = _answers(model, replace(kv, dtype=EXACT), kept_in=DTYPES[kv.dtype])
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise UnknownStructure(f"parts that compute nothing in float32 ({in_a_line(error)})") from error
    if model.coded:
        return Right(answers, OF_CODES[model.dtype])
    rounding = max(map(gap, defined, answers))
    return Right(answers, max(TOLERANCES[model.dtype], ROUNDINGS * rounding))


def _compiles(model: Model, layout: KvLayout, right: Right, kernel_for: KernelFor) -> bool:
    """Whether a kernel's way is taken. Raises UnknownStructure."""
    try:
        why = _tried(model, layout, right, kernel_for)
    except (UnsupportedShapes, KernelUnavailable) as other:
        if model.coded:
            raise _uncoded(layout, str(other)) from other
        log.info("steps are not compiled", why=str(other))
        return False
    if why:
        log.warning("steps are not compiled", why=why)
    return not why


def _tried(model: Model, layout: KvLayout, right: Right, kernel_for: KernelFor | None = None) -> str:
    """Why our own way is not taken, and `model` is as it was; else nothing. Raises UnknownStructure,
    UnsupportedShapes and KernelUnavailable."""
    try:
        (kv,) = layout.groups
        model.take_apart(kernel_for, kv.page_tokens)
        gaps = [*map(gap, _answers(model, kv, ours=True), right.answers)]
        close = all(gap <= right.tolerance for gap in gaps)
        why = "" if close else f"results differ by {max(gaps):.2g} of their length"
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        why = f"{type(error).__name__}: {error}"
    if why and model.coded:
        raise _uncoded(layout, why)
    if why:
        model.put_together()
    return why


def _uncoded(layout: KvLayout, why: str) -> StartupError:
    """Codes are multiplied by a kernel, or not at all."""
    return StartupError(
        f"--quantize {layout.quantize}: codes are multiplied by compiled steps alone, which are not there: "
        f"{why}; leave out --quantize"
    )


def _answers(
    model: Model, kv: KvGroup, *, ours: bool = False, kept_in: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The logits of all positions, step by step, and what is in the pages after the last. `ours`: what a step
    fetched is kept for the next. A compiled step computes the last positions by themselves, too.
    `kept_in`: what keys and values are rounded to on their way to the pages."""
    numbers = torch.Generator().manual_seed(7)
    more = MORE if model.reaches else 0
    prompts = torch.randint(model.vocab_size, (2, LONG + more), generator=numbers).tolist()
    sequences = [Sequence(Request("proof", tuple(prompt), 1), []) for prompt in prompts]
    kv = replace(kv, page_tokens=min(kv.page_tokens, PAGE_TOKENS_MAX))
    pages = kv.pages_for(LONG + more)
    cache = PagedKvCache(kv, 2 * pages, model.device)
    cache.tensor.zero_()
    tables = torch.randperm(2 * pages, generator=numbers).view(2, pages).tolist()
    kept = DecodeWorkspace(cache, cache.length * 2) if ours and model.device.type == "cpu" else None
    reaches = {layer: reach.narrowed(NARROW) for layer, reach in model.reaches.items()}
    compiled = model.compiled_steps(cache, reaches)
    told: list[torch.Tensor] = []
    for place, ((start, stop), *short) in enumerate(STEPS):
        later = model.facts.context_length - LONG - more if place >= EARLY else 0
        spans = [(start + more if start else 0, stop + more), *short]
        rows = [
            Row(sequence, *span, (table,), sample=False)
            for sequence, span, table in zip(sequences, spans, tables, strict=False)
        ]
        with torch.inference_mode():
            logits: torch.Tensor | None
            if compiled is not None:
                everywhere = compiled.logits(rows, everywhere=True, later=later)
                ends = [end - 1 for end in accumulate(row.stop - row.start for row in rows)]
                last = [replace(row, sample=True) for row in rows]
                everywhere[ends] = compiled.logits(last, later=later)
                logits = everywhere
            else:
                plan = make_plan(rows, cache, model.device, kept)
                keep = torch.arange(plan.tokens.shape[1], device=model.device)
                positions = plan.positions + later
                step = PagedAttention(plan, cache, reaches)
                if kept_in is None:
                    logits = model.compute(plan.tokens, positions, keep, step)
                else:
                    attend = partial(_rounded, step, kept_in)
                    logits = model.logits(plan.tokens, positions, keep, attend)
        if kept is not None:
            kept.ended(well=True)
        if logits is not None:
            told.append(logits.float())
    return [*told, cache.tensor.float()]


def _rounded(
    step: PagedAttention,
    kept_in: torch.dtype,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    key, value = (each.to(kept_in).to(each.dtype) for each in (key, value))
    return step(module, query, key, value, options)


def gap(seen: torch.Tensor, right: torch.Tensor) -> float:
    """How far `seen` is from what is right, as a share of that; NaN where something is not a number."""
    return float((seen - right).norm() / right.norm())
