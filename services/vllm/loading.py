"""Loading of an engine on vLLM: the worker, its memory, and the layout that peers compare."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed

from baton.engine_interface import EngineFacts
from baton.grammars.grammar_cache import GrammarCache
from baton.grammars.vocabulary import read_vocabulary
from baton.inference.collectives import Collectives, alone
from baton.inference.group_exchange import GROUPS_BYTES, decode_groups, encode_groups
from baton.inference.kv_memory import divide_memory
from baton.inference.remote_writes import flush_for
from baton.inference.step_engine import StepEngine, drawing_rank
from baton.models.engine_features import STATE_FEATURES
from baton.models.model_facts import CONFIG_FILE, ModelFacts, UnsupportedModel, json_object
from baton.models.model_requirements import needs_of
from baton.pages.layout import KvGroup, KvLayout
from baton.pages.rank_layout import rank_layout
from baton.rooms.worker_facts import CANARY_TOKENS
from baton.runtime.errors import StartupError
from baton.runtime.worker_settings import WorkerSettings
from baton.vllm.kv_groups import merge_groups
from baton.vllm.memory import NULL_BLOCKS, AttentionMemory, StateMemory, VllmKvMemory
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
    groups = _agree_on_groups(model, facts, rank_group)
    needed = STATE_FEATURES.intersection(needs_of(json_object(directory / CONFIG_FILE)))
    if needed and not any(each.is_state for each in groups):  # left out by the definition that vLLM found
        raise UnsupportedModel.needing(facts.name, "--engine vllm", sorted(needed))
    own = rank_layout(KvLayout(facts.fingerprint, tuple(groups)), topology, rank).groups
    mine = [(each.layers, each.page_bytes) for each in own]
    theirs = [(each.ids, each.page_bytes) for each in model.groups]
    if mine != theirs:
        raise StartupError(f"vLLM divides the model {facts.name} into {theirs}, and Baton into {mine}")
    memory = settings.kv_cache_memory - NULL_BLOCKS * sum(each.page_bytes for each in own)
    pages = divide_memory(own, max(0, memory), CANARY_TOKENS, settings.expected_context)
    pages = tuple(rank_group.minimum(each) for each in pages)
    model.take_memory(pages)
    encoded = tuple(
        replace(each, encoding=each.encoding + model.encoding(number)) for number, each in enumerate(groups)
    )
    whole = KvLayout(facts.fingerprint, encoded, facts.context_length)
    draws = rank == drawing_rank(rank_group)
    grammars = GrammarCache(partial(read_vocabulary, directory, facts)) if draws else None
    engine = _engine(model, whole, pages, rank_group, facts.vocab_size, grammars)
    model.record()
    return engine


def load_second_engine(engine: StepEngine) -> StepEngine:
    """Return another engine over the same weights, with as many pages. Raises NotEnoughMemory."""
    assert isinstance(engine.runner, VllmRunner)
    model, pages = engine.runner.model, [each.pages for each in engine.caches]
    return _engine(model, engine.whole, pages, alone(), engine.vocab_size, engine.grammars)


def _agree_on_groups(model: ModelWorker, facts: ModelFacts, rank_group: Collectives) -> list[KvGroup]:
    """Return the KV groups of the whole model, and put those of `model` into their order.

    Raises StartupError if a stage of a pipeline has no layer of a group.
    """
    mine, ranks = model.kv_groups(facts.context_length), rank_group.topology.ranks
    parts: list[Sequence[KvGroup]] = [mine]
    if rank_group.topology.pipeline > 1:
        rank_group.minimum(0)  # all ranks have loaded their parts
        tables = [torch.zeros(GROUPS_BYTES, dtype=torch.uint8) for _ in range(ranks)]
        torch.distributed.all_gather(tables, encode_groups(mine))
        parts = [decode_groups(table) for table in tables]
    groups = merge_groups(group for part in parts for group in part)
    index = {replace(each, layers=()): number for number, each in enumerate(mine)}
    order = [index.get(replace(each, layers=()), -1) for each in groups]
    if -1 in order:
        raise StartupError(f"rank {rank_group.rank} has no layer of KV group {order.index(-1)}")
    model.order_groups(order)
    return groups


def _engine(
    model: ModelWorker,
    whole: KvLayout,
    pages: Sequence[int],
    rank_group: Collectives,
    vocab_size: int,
    grammars: GrammarCache | None,
) -> StepEngine:
    groups = rank_layout(whole, rank_group.topology, rank_group.rank).groups
    memories = [_memory(group, count, model.device) for group, count in zip(groups, pages, strict=True)]
    model.bind(memories)
    on_cpu = model.device.type == "cpu"
    # On CPUs only kernels in float32 do not depend on the batch. On GPUs vLLM has a variable for it.
    is_invariant = on_cpu or os.environ.get("VLLM_BATCH_INVARIANT") == "1"
    if on_cpu and any(group.dtype != "float32" for group in groups):
        is_invariant = False
    requests = RequestCache(model.runner, whole.page_tokens, 2 * model.rows_max)
    return StepEngine(
        whole,
        memories,
        rank_group,
        VllmRunner(model, memories, requests, vocab_size),
        facts=EngineFacts("vllm", is_invariant and not whole.states, drafts=not whole.states),
        vocab_size=vocab_size,
        context_length=whole.context_length,
        flush=flush_for(model.device),
        grammars=grammars,
    )


def _memory(group: KvGroup, pages: int, device: torch.device) -> VllmKvMemory:
    if group.is_state:
        return StateMemory(group, pages, device)
    # The kernels of latent attention on CPUs take a layer for one run of memory.
    copies = device.type == "cpu" and "mla" in group.encoding
    return AttentionMemory(group, pages, device, _values_at(group), copies=copies)


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
