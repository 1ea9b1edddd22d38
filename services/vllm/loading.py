"""Loading of an engine on vLLM: the worker, its memory, and the layout that peers compare."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from baton.engine_interface import EngineFacts
from baton.grammars.grammar_cache import GrammarCache
from baton.grammars.vocabulary import read_vocabulary
from baton.inference.collectives import Collectives, alone
from baton.inference.kv_memory import pages_that_fit
from baton.inference.remote_writes import flush_for
from baton.inference.step_engine import StepEngine, drawing_rank
from baton.models.model_facts import ModelFacts
from baton.pages.layout import KvGroup, KvLayout
from baton.pages.rank_layout import rank_layout
from baton.rooms.worker_facts import CANARY_TOKENS
from baton.runtime.errors import StartupError
from baton.runtime.worker_settings import WorkerSettings
from baton.vllm.kv_groups import kv_group
from baton.vllm.memory import NULL_BLOCKS, VllmKvMemory
from baton.vllm.rows import RequestCache
from baton.vllm.vllm_runner import VllmRunner
from baton.vllm.worker import ModelWorker, start_worker


def load_engine(
    settings: WorkerSettings, directory: Path, facts: ModelFacts, rank_group: Collectives
) -> StepEngine:
    """Load the model in `directory`, or the part of a rank of `rank_group`, and allocate its KV pages.

    Blocks for seconds. Raises StartupError.
    """
    topology, rank = rank_group.topology, rank_group.rank
    model = start_worker(settings, directory, facts, topology, rank)
    layers = range(model.hidden_layers) if topology.pipeline > 1 else model.layers.ids
    group = kv_group(layers, range(model.kv_heads), model.layers.spec)
    own = rank_layout(KvLayout(facts.fingerprint, (group,)), topology, rank).groups[0]
    if own.layers != model.layers.ids or own.page_bytes != model.layers.page_bytes:
        theirs, mine = (model.layers.ids, model.layers.page_bytes), (own.layers, own.page_bytes)
        raise StartupError(f"vLLM divides the model {facts.name} into {theirs}, and Baton into {mine}")
    memory = max(0, settings.kv_cache_memory - NULL_BLOCKS * own.page_bytes)
    pages = rank_group.minimum(pages_that_fit(own, memory, CANARY_TOKENS))
    model.take_memory(NULL_BLOCKS + pages)
    group = replace(group, encoding=model.encoding)
    whole = KvLayout(facts.fingerprint, (group,), facts.context_length)
    draws = rank == drawing_rank(rank_group)
    grammars = GrammarCache(partial(read_vocabulary, directory, facts)) if draws else None
    engine = _engine(model, whole, pages, rank_group, facts.vocab_size, grammars)
    model.record()
    return engine


def load_second_engine(engine: StepEngine) -> StepEngine:
    """Return another engine over the same weights, with as many pages. Raises NotEnoughMemory."""
    assert isinstance(engine.runner, VllmRunner)
    model, pages = engine.runner.model, engine.cache.pages
    return _engine(model, engine.whole, pages, alone(), engine.vocab_size, engine.grammars)


def _engine(
    model: ModelWorker,
    whole: KvLayout,
    pages: int,
    rank_group: Collectives,
    vocab_size: int,
    grammars: GrammarCache | None,
) -> StepEngine:
    (group,) = rank_layout(whole, rank_group.topology, rank_group.rank).groups
    on_cpu = model.device.type == "cpu"
    # The kernels of latent attention on CPUs take a layer for one run of memory.
    copies = on_cpu and "mla" in group.encoding
    cache = VllmKvMemory(group, pages, model.device, _values_at(group), copies=copies)
    model.bind(cache)
    # On CPUs only kernels in float32 do not depend on the batch. On GPUs vLLM has a variable for it.
    is_invariant = group.dtype == "float32" if on_cpu else os.environ.get("VLLM_BATCH_INVARIANT") == "1"
    requests = RequestCache(model.runner, (group.page_tokens,), 2 * model.rows_max)
    return StepEngine(
        whole,
        [cache],
        rank_group,
        VllmRunner(model, cache, requests, vocab_size),
        facts=EngineFacts("vllm", is_invariant),
        vocab_size=vocab_size,
        context_length=whole.context_length,
        flush=flush_for(model.device),
        grammars=grammars,
    )


def _values_at(group: KvGroup) -> int | None:
    """Return `values_at` of the memory of a group in its encoding.

    vLLM's back ends write vectors of a token side by side, but for those of CPUs, which write keys before
    values, and keys column by column. With AMX or NEON they also reorder values.
    """
    if not group.encoding.startswith("vllm-cpu-attn"):
        return 0
    vectors = {"vllm-cpu-attn-vec", "vllm-cpu-attn-vec16"}
    by_token = group.encoding in vectors and len(group.planes) == 2
    return group.planes[0].elements * group.page_tokens if by_token else None
