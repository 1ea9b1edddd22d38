"""Loading of an engine: the model, the execution of its steps, and KV pages of the configured size."""

from collections import abc
from functools import partial
from pathlib import Path

import torch

from baton.engine.execution.execution import Execution
from baton.engine.execution.step_compiler import kernel as compiled_kernel
from baton.engine.kv_cache import EngineCache, make_cache
from baton.engine.loading.library_model import LibraryModel
from baton.engine.loading.model_loading import load_model
from baton.engine.loading.runner_selection import library_execution, select_execution
from baton.engine.quantization.weight_quantization import WeightQuantization
from baton.engine.torch_engine import TorchEngine
from baton.grammars.grammar_cache import GrammarCache
from baton.grammars.vocabulary import read_vocabulary
from baton.inference.collectives import Collectives, alone
from baton.inference.device import find_device, find_dtype
from baton.inference.kv_memory import divide_memory
from baton.inference.remote_writes import flush_for
from baton.inference.step_engine import drawing_rank
from baton.pages.layout import KvLayout
from baton.pages.rank_layout import rank_layout
from baton.runtime.errors import StartupError
from baton.runtime.model_options import LoadFormat, Quantize
from baton.sampling.prompt_scores import SCORING_BYTES
from baton.topology import Topology


def load_engine(
    directory: Path,
    *,
    dtype: str = "auto",
    load_format: LoadFormat = LoadFormat.AUTO,
    context_length: int = 0,
    quantization: WeightQuantization | None = None,
    device: str = "auto",
    page_tokens: int = 16,
    kv_cache_memory: int = 2**30,
    tokens_min: int = 1,
    expected_tokens: int = 0,
    threads: int = 1,
    scores_prompts: bool = False,
    compiled: bool = False,
    topology: Topology | None = None,
    rank: int = 0,
    rank_group: Collectives | None = None,
) -> TorchEngine:
    """Load the model in `directory`, or this rank's part of it, and allocate its KV pages.

    Pages take at most `kv_cache_memory` bytes. Every rank has as many, enough for `tokens_min` tokens.
    `expected_tokens`: tokens of a sequence for which several KV groups divide the memory, 0 for a default.

    `topology`, `rank`: those of the worker. `rank_group`: collectives between several ranks.
    `dtype`: "auto", "bfloat16" or "float32", of weights and pages alike. `load_format`: real or dummy
    weights.
    `context_length`: most tokens of a sequence, 0 for what the model's configuration says.
    `quantization`: quantize weights, on a worker of one rank. `device`: "auto", "cpu" or "cuda[:N]".
    `threads`: of the CPU's tensor operations, for the whole process.
    `scores_prompts`: reserve memory for the logits of scored prompts.
    `compiled`: compute steps in one compiled call, on a CPU where that is possible.

    Raises StartupError: a missing, damaged or unsupported model, a number of ranks that does not divide it, a
    device that does not exist, too little memory.
    """
    torch.set_num_threads(threads)
    rank_group = _collectives(rank_group, topology or Topology(), rank)
    target = find_device(device, rank_group.rank)
    dtype = find_dtype(dtype, target, rank_group)
    if quantization is not None:
        _check_quantization(quantization, target, rank_group, compiled=compiled)
    model = load_model(directory, dtype, device, rank_group, load_format, context_length, quantization)
    whole = _whole_layout(model, dtype, page_tokens, quantization)
    layout = rank_layout(whole, rank_group.topology, rank_group.rank)
    execution = _execution(model, layout, rank_group, compiled=compiled)
    pages = divide_memory(layout.groups, kv_cache_memory, tokens_min, expected_tokens)
    pages = tuple(map(rank_group.minimum, pages))
    caches = _caches(layout, pages, model.device, SCORING_BYTES if scores_prompts else 0)
    draws = rank_group.rank == drawing_rank(rank_group)
    grammars = GrammarCache(partial(read_vocabulary, directory, model.facts)) if draws else None
    runner, flush = execution.runner(caches), flush_for(model.device)
    return TorchEngine(model, whole, caches, rank_group, execution, runner, flush, grammars)


def load_second_engine(
    engine: TorchEngine, kv_cache_memory: int, tokens_min: int = 1, expected_tokens: int = 0
) -> TorchEngine:
    """Return a second engine over the same weights, for prefill, with KV pages of its own.

    Only one of the two engines runs a step at a time. The pages take at most `kv_cache_memory` bytes. Raises
    NotEnoughMemory.
    """
    model, execution, groups = engine.model, engine.execution, engine.layout.groups
    pages = divide_memory(groups, kv_cache_memory, tokens_min, expected_tokens)
    caches = _caches(engine.layout, pages, model.device)
    return TorchEngine(
        model,
        engine.whole,
        caches,
        alone(),
        execution,
        execution.runner(caches),
        flush_for(model.device),
        engine.grammars,
    )


def _caches(
    layout: KvLayout, pages: abc.Sequence[int], device: torch.device, beside: int = 0
) -> list[EngineCache]:
    """Allocate the caches of all KV groups. `pages`: number of pages, by group. Raises NotEnoughMemory.

    `beside`: bytes that are to be left on the device.
    """
    sizes = [group.page_bytes * count for group, count in zip(layout.groups, pages, strict=True)]
    return [
        make_cache(group, count, device, beside + sum(sizes[index + 1 :]))
        for index, (group, count) in enumerate(zip(layout.groups, pages, strict=True))
    ]


def _whole_layout(
    model: LibraryModel, dtype: str, page_tokens: int, quantization: WeightQuantization | None
) -> KvLayout:
    """Return the layout of the worker's KV pages over all ranks."""
    return KvLayout(
        model=model.facts.fingerprint,
        groups=model.geometry.groups(dtype, page_tokens, model.facts.context_length),
        context_length=model.facts.context_length,
        quantize=(Quantize.NONE if quantization is None else quantization.how).value,
    )


def _collectives(rank_group: Collectives | None, topology: Topology, rank: int) -> Collectives:
    """Return the collectives of a rank. Raises ValueError if they are another rank's."""
    rank_group = alone() if rank_group is None else rank_group
    if (rank_group.topology, rank_group.rank) != (topology, rank):
        raise ValueError(
            f"rank {rank} of {topology} with a team of rank {rank_group.rank} of {rank_group.topology}"
        )
    return rank_group


def _execution(
    model: LibraryModel, layout: KvLayout, rank_group: Collectives, *, compiled: bool
) -> Execution:
    """Return the execution that computes the steps of this rank. `layout`: layout of the rank's KV pages."""
    if rank_group.topology.ranks > 1:
        return library_execution(model)
    on_cpu = model.device.type == "cpu"
    return select_execution(model, layout, compiled_kernel if compiled and on_cpu else None)


def _check_quantization(
    quantization: WeightQuantization, target: torch.device, rank_group: Collectives, *, compiled: bool
) -> None:
    """Raise StartupError if no execution can compute with the weights of `quantization` here."""
    if quantization.how is Quantize.KEEP and quantization.gguf is None:
        raise StartupError(
            f"{quantization}: the model is no GGUF file, whose blocks would be kept: give int8 or int4"
        )
    if rank_group.topology.ranks > 1:
        raise StartupError(
            f"{quantization}: the ranks of a group compute over plain weights; leave one of them out"
        )
    if quantization.multiplied and target.type != "cpu":
        raise StartupError(
            f"{quantization}: codes are multiplied on CPUs alone, and --device is {target}: give cpu"
        )
    if quantization.multiplied and not compiled:
        raise StartupError(
            f"{quantization}: codes are multiplied by compiled steps alone: leave out --compiled-steps false"
        )
