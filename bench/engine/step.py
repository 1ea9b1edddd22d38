"""Time of a model step, beside the machine's limit for it.

Decode has to read every weight and the sequences' keys and values once. Its limit is the time to read as
many bytes. Prefill has to multiply. Its limit is the time of the model's matrix products, of the same
shapes over weights in a library's layout. All tokens count in all layers, although a compiled step leaves
out what the last layer adds to unread tokens (3 % of a model of thirty layers).
"""

import json
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Final

import typer

from baton.rooms.request import Grammar, GrammarKind, Request, Sampling
from baton.runtime.errors import StartupError
from baton.runtime.model_options import LoadFormat, Quantize
from bench.report import Runs, print_result, seconds_of

if TYPE_CHECKING:
    from baton.engine.torch_engine import TorchEngine
    from baton.engine_interface import Row
    from baton.grammars.grammar_state import GrammarState

PROFILE_LINES: Final = 16
STEPS_MAX: Final = 64
"""Most steps of one answer. Later measurements repeat the last step."""
ANY_JSON: Final = "json"
GREEDY, DRAWN = Sampling(temperature=0.0), Sampling(temperature=1.0)
"""Sampling of plain rows. DRAWN is used with --grammar, for constrained and free rows."""
SIDE, SIDE_ON_GPU = 2048, 8192
"""Side of the square matrices whose product shows the machine's peak rate, on a CPU and on a GPU."""


class StepPhase(StrEnum):
    DECODE = "decode"
    PREFILL = "prefill"


def step(
    runs: Runs = 15,
    model: Annotated[str, typer.Option(help="A model directory, a GGUF file, or the word demo.")] = "demo",
    phase: Annotated[
        StepPhase, typer.Option(help="One token of each sequence, or all of them.")
    ] = StepPhase.DECODE,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:N].")] = "cpu",
    load_format: Annotated[
        LoadFormat, typer.Option(help="The model's weights, or any numbers in their shapes.")
    ] = LoadFormat.AUTO,
    quantize: Annotated[
        Quantize,
        typer.Option(help="Weights as codes (--quantize); a prompt's, as the numbers they stand for."),
    ] = Quantize.NONE,
    compiled: Annotated[bool, typer.Option(help="On a CPU, one call a step (--compiled-steps).")] = True,
    batch: Annotated[int, typer.Option(min=1, max=256, help="Sequences in the step.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")] = 512,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 1,
    kv_cache_memory: Annotated[
        int, typer.Option(min=2**20, help="Bytes for the sequences' keys and values.")
    ] = 2**30,
    grammar: Annotated[
        str,
        typer.Option(
            help="Also the step with rows held to the JSON schema in this file, or to any JSON: json."
        ),
    ] = "",
    drafts: Annotated[
        int,
        typer.Option(
            min=0, max=STEPS_MAX - 1, help="Also the step with so many drafts a row, all of them taken."
        ),
    ] = 0,
    profile: Annotated[bool, typer.Option(help="Also which operators the time of a step goes to.")] = False,
) -> None:
    """One model step, beside reading its bytes (decode) or its matrix products (prefill)."""
    from baton.engine.execution.execution_kind import ExecutionKind
    from baton.engine.loading.engine_loading import load_engine
    from baton.engine.quantization.weight_quantization import weight_quantization
    from baton.models.model_files import prepare, resolve

    source = resolve(model, load_format)
    directory = prepare(source, lambda _: None)
    engine = load_engine(
        directory,
        dtype=dtype,
        load_format=load_format,
        quantization=weight_quantization(quantize, source, multiplied=phase is StepPhase.DECODE),
        device=device,
        kv_cache_memory=kv_cache_memory,
        threads=threads,
        compiled=compiled,
    )
    if drafts and phase is not StepPhase.DECODE:
        raise StartupError("--drafts: a prompt is known; take --phase decode")
    held = _grammar(grammar, phase)
    rows = _rows(engine, phase, batch, context, DRAWN if held else GREEDY)
    facts: dict[str, object] = {
        "phase": phase.value,
        "batch": batch,
        "context": context,
        "dtype": engine.cache.group.dtype,
        "quantize": quantize.value,
        "device": engine.cache.device,
        "compiled": engine.execution.kind is ExecutionKind.COMPILED,
    }
    works: dict[str, Callable[[], object]] = {"step": _stepping(engine, phase, rows)}
    if held is not None:
        holding = _rows(engine, phase, batch, context, DRAWN, held)
        works["held"] = _stepping(engine, phase, holding)
    if drafts:
        drafting = _drafting(engine, _rows(engine, phase, batch, context, GREEDY), drafts)
        works["drafts"] = partial(engine.step, drafting)
    if phase is StepPhase.DECODE:
        limit = "read"
        size = engine.execution.weight_bytes + batch * (context + 1) * engine.cache.group.token_bytes
        works[limit] = _reading(engine, size)
        facts |= {"weight_bytes": engine.execution.weight_bytes, "read_bytes": size}
    else:
        limit = "products"
        works[limit] = _multiplying(engine, batch, batch * context)
        works["large_product"] = _large_product(engine)
        gflop = _gflop(engine, batch, batch * context)
        facts |= {"gflop": round(gflop, 3), "large_product_gflop": round(2 * _side(engine) ** 3 / 1e9, 3)}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for run in range(1 + runs):
        for name, work in works.items():
            taken = seconds_of(_to_its_end(engine, work))
            if run:  # the first finds nothing ready
                seconds[name].append(taken)
    least = {name: min(values) for name, values in seconds.items()}
    facts["least_ms"] = {name: round(value * 1000, 3) for name, value in least.items()}
    facts["ratio_of_least"] = round(least["step"] / least[limit], 3)
    for name in ("held", "drafts"):
        if name in works:
            facts[f"{name}_ratio"] = round(median(seconds[name]) / median(seconds["step"]), 3)
            facts[f"{name}_ratio_of_least"] = round(least[name] / least["step"], 3)
    if profile:
        facts["profile_ms"] = _profile(engine, works["step"])
    print_result("step", seconds, limit, facts)


def _grammar(told: str, phase: StepPhase) -> Grammar | None:
    """Return the grammar that constrains rows, or None. Raises StartupError."""
    if not told:
        return None
    if phase is not StepPhase.DECODE:
        raise StartupError("--grammar: a prompt is held to nothing but at its end; take --phase decode")
    if told == ANY_JSON:
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "minItems": STEPS_MAX}))
    try:
        return Grammar(GrammarKind.JSON_SCHEMA, Path(told).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--grammar {told}: {error}") from error


def _rows(
    engine: "TorchEngine",
    phase: StepPhase,
    batch: int,
    context: int,
    sampling: Sampling,
    grammar: Grammar | None = None,
) -> "list[Row]":
    """Return the rows of the first measured step, after the steps before it. Raises StartupError."""
    from baton.engine_interface import DrawFailed, Row, Sequence

    pages = engine.cache.group.pages_for(context + STEPS_MAX)
    if batch * pages > engine.cache.pages:
        needed = batch * pages * engine.cache.group.page_bytes
        raise StartupError(f"--kv-cache-memory {engine.cache.length}: the sequences take {needed} bytes")
    rows = []
    for index in range(batch):
        # Every other page, so that a sequence's pages are not one run of memory.
        table = [place for start in (0, 1) for place in range(start, batch * pages, 2)]
        table = table[index * pages : (index + 1) * pages]
        prompt = tuple(range(7, 7 + context))
        request = Request(
            f"bench-{index}",
            prompt,
            max_tokens=STEPS_MAX,
            eos_token_ids=engine.model.facts.eos_token_ids,
            sampling=replace(sampling, seed=index),
            grammar=grammar,
        )
        if phase is StepPhase.PREFILL:
            rows.append(Row(Sequence(request, []), 0, context, (table,), sample=True))
            continue
        sequence = Sequence(request, [7] if grammar is None else [])
        if grammar is not None:
            sequence.fold = _fold(engine, grammar)
        first = Row(sequence, 0, context, (table,), sample=grammar is not None)
        for taken in engine.step([first]):
            if not isinstance(taken, DrawFailed):
                sequence.output += [token.id for token in taken]
        rows.append(Row(sequence, context, context + 1, (table,), sample=True))
    return rows


def _drafting(engine: "TorchEngine", rows: "list[Row]", drafts: int) -> "list[Row]":
    """Return the same rows with `count` draft tokens, which are the right next ones."""
    from baton.engine_interface import DrawFailed

    for _ in range(drafts):
        told = engine.step(rows)
        rows = [
            replace(row, drafts=[token.id for token in taken])
            for row, taken in zip(rows, told, strict=True)
            if not isinstance(taken, DrawFailed)
        ]
    return rows


def _fold(engine: "TorchEngine", grammar: Grammar) -> "GrammarState":
    """Raises StartupError."""
    from baton.grammars.grammar_compiler import GrammarRefused

    if engine.grammars is None:
        raise StartupError("--grammar: this rank draws nothing")
    try:
        [fold] = engine.grammars.folds(grammar, [], 1).result()
    except GrammarRefused as error:
        raise StartupError(f"--grammar: {error}") from error
    return fold


def _stepping(engine: "TorchEngine", phase: StepPhase, rows: "list[Row]") -> Callable[[], object]:
    """Return the function that runs one step. In decode each call continues the last step, up to
    `STEPS_MAX` times or to the answer's end."""
    from baton.engine_interface import DrawFailed, Row

    def step() -> None:
        for place, (row, taken) in enumerate(zip(rows, engine.step(rows), strict=True)):
            request = row.sequence.request
            more = row.stop < request.tokens_max - 1
            if phase is not StepPhase.DECODE or isinstance(taken, DrawFailed) or not more:
                continue
            [token] = taken
            if request.grammar is None or token.id not in request.ending_token_ids:
                row.sequence.output.append(token.id)
                rows[place] = Row(row.sequence, row.stop, row.stop + 1, row.tables, sample=True)

    return step


def _to_its_end(engine: "TorchEngine", work: Callable[[], object]) -> Callable[[], object]:
    """Wait until the GPU has computed what was launched."""
    import torch

    place = engine.model.device
    if place.type != "cuda":
        return work

    def wait() -> None:
        work()
        torch.cuda.synchronize(place)

    return wait


def _reading(engine: "TorchEngine", size: int) -> Callable[[], object]:
    import torch

    memory = torch.ones(size // 4, device=engine.model.device)
    return memory.sum


def _multiplying(engine: "TorchEngine", batch: int, tokens: int) -> Callable[[], object]:
    import torch

    from baton.engine.execution.linear_layers import fused_linear

    products = []
    with torch.inference_mode():
        for (outs, ins), count in engine.model.products.items():
            weight = engine.cache.tensor.new_empty(outs, ins).normal_(std=0.02)
            linear = torch.nn.Linear(ins, outs, bias=False, device="meta")
            linear.weight = torch.nn.Parameter(weight, requires_grad=False)
            rows = weight.new_empty(_rows_of(engine, outs, batch, tokens), ins).normal_()
            products.append((fused_linear([linear]), rows, count))

    def multiply() -> None:
        with torch.inference_mode():
            for product, rows, count in products:
                for _ in range(count):
                    product(rows)

    return multiply


def _gflop(engine: "TorchEngine", batch: int, tokens: int) -> float:
    shapes = engine.model.products.items()
    return sum(
        2e-9 * _rows_of(engine, outs, batch, tokens) * outs * ins * count for (outs, ins), count in shapes
    )


def _rows_of(engine: "TorchEngine", outs: int, batch: int, tokens: int) -> int:
    """Return rows per matrix product. The output head sees the last token of each sequence alone."""
    return batch if outs == engine.model.vocab_size else tokens


def _large_product(engine: "TorchEngine") -> Callable[[], object]:
    # Numbers at random: a GPU multiplies zeros and ones at a rate that no model sees.
    matrix = engine.cache.tensor.new_empty(_side(engine), _side(engine)).normal_()
    return lambda: matrix @ matrix


def _side(engine: "TorchEngine") -> int:
    return SIDE_ON_GPU if engine.model.device.type == "cuda" else SIDE


def _profile(engine: "TorchEngine", work: Callable[[], object]) -> dict[str, float]:
    """Return milliseconds by operator, without those it calls, the longest first. Profiling adds to them.
    On a GPU they are times of kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    on_gpu = engine.model.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profiling(activities=activities) as seen:
        _to_its_end(engine, work)()
    micros = attrgetter("self_device_time_total" if on_gpu else "self_cpu_time_total")
    spent = {event.key: micros(event) / 1000 for event in seen.key_averages()}
    longest = sorted(spent, key=lambda key: -spent[key])[:PROFILE_LINES]
    return {key: round(spent[key], 3) for key in longest}
