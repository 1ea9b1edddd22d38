"""Start of a worker's engine: connecting the ranks, loading the model, and a first step."""

from functools import partial

from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.loading.draft_files import (
    FoundModel,
    draft_errors_named,
    draft_quantization,
    find_draft_model,
)
from baton.engine.loading.engine_loading import load_engine, load_second_engine
from baton.engine.quantization.weight_quantization import weight_quantization
from baton.engine.torch_engine import TorchEngine
from baton.inference.available_memory import memory_errors_as_startup_errors
from baton.inference.collectives import Collectives, alone
from baton.inference.rank_startup import start_with_ranks
from baton.inference.step_engine import drawing_rank
from baton.models.engine_features import missing_in_torch
from baton.models.model_files import prepare, resolve
from baton.rooms.worker_facts import CANARY_TOKENS
from baton.runtime.errors import StartupError
from baton.runtime.logging import Log
from baton.runtime.memory_trimming import trimming_memory
from baton.runtime.model_options import LoadFormat, Quantize
from baton.runtime.worker_settings import DraftModelFiles, WorkerSettings
from baton.sampling.draft_model import DraftModel
from baton.topology import Topology

log = Log(__name__)


def start_rank(settings: WorkerSettings, threads: int) -> TorchEngine:
    """Start the engine of the rank that `settings` name, at the same time as the worker's other ranks.
    Blocks.

    Raises the errors of `start_engine`, and GroupLost if another rank does not start.
    """
    return start_with_ranks(settings, partial(start_engine, settings, threads))


@trimming_memory()
def start_engine(
    settings: WorkerSettings,
    threads: int,
    topology: Topology | None = None,
    rank: int = 0,
    rank_group: Collectives | None = None,
) -> TorchEngine:
    """Load the model of `settings`, or the part of it that `rank` computes, and run a first step.

    The model's files are found and converted first, if necessary. Its KV cache is allocated. With several
    ranks, all members of `rank_group` call this at the same time. Blocks for seconds.
    Raises StartupError for a missing or unsupported model, a number of ranks that does not divide it, or too
    little memory. Raises RankGroupBroken if another rank does not start.
    """
    load_format = LoadFormat(settings.load_format)
    source = resolve(settings.model, load_format, missing_in_torch)
    directory = prepare(source, lambda line: log.info("preparing the model", step=line))
    drafting = (
        settings.draft_model if rank == drawing_rank(alone() if rank_group is None else rank_group) else None
    )
    drafts = None if drafting is None else find_draft_model(drafting, directory)
    with memory_errors_as_startup_errors(f"the model {source.path}"):
        engine = load_engine(
            directory,
            load_format=load_format,
            context_length=settings.context_length,
            quantization=weight_quantization(
                Quantize(settings.quantize), source, multiplied=settings.multiplies_codes
            ),
            dtype=settings.dtype,
            device=settings.device,
            page_tokens=settings.page_tokens,
            kv_cache_memory=settings.kv_cache_memory,
            tokens_min=CANARY_TOKENS,
            expected_tokens=settings.expected_context,
            threads=threads,
            scores_prompts=settings.scores_prompts,
            compiled=settings.compiled_steps,
            topology=topology,
            rank=rank,
            rank_group=rank_group,
        )
        engine.start()
        if drafting is not None and drafts is not None:
            start_draft_model(engine, drafts, drafting, settings, threads)
    tokens = min(cache.tokens for cache in engine.caches)
    log.info(
        "engine ready",
        tokens=tokens,
        dtype=engine.model.dtype,
        quantize=engine.layout.quantize,
        device=str(engine.device),
        compiled=engine.execution.kind is ExecutionKind.COMPILED,
    )
    return engine


def start_draft_model(
    engine: TorchEngine, drafts: FoundModel, files: DraftModelFiles, settings: WorkerSettings, threads: int
) -> None:
    """Load the draft model, quantized as the model is, and let it draft tokens for `engine`.

    Call it on the rank that samples tokens. Blocks for seconds. Raises StartupError for an unsupported model
    or too little memory.
    """
    with draft_errors_named(files), memory_errors_as_startup_errors("it"):
        beside = load_engine(
            drafts.directory,
            quantization=draft_quantization(settings, drafts.source),
            dtype=settings.dtype,
            device=str(engine.device),
            page_tokens=settings.page_tokens,
            kv_cache_memory=files.kv_memory,
            threads=threads,
            compiled=settings.compiled_steps,
        )
        if beside.whole.states:
            raise StartupError("it needs states of layers, which cannot be taken back with rejected drafts")
        beside.cache.populate()
        beside.warm_up()
    engine.draft_with(DraftModel(beside, engine.vocab_size))
    log.info("draft model ready", model=files.model, tokens=beside.cache.tokens, bytes=beside.cache.length)


def start_both(settings: WorkerSettings, threads: int) -> tuple[TorchEngine, TorchEngine]:
    """Start the engines of a process that serves both prefill and decode, and return them in this order.

    Weights are loaded once. Each engine has the number of pages that `settings` give its side. Blocks. Raises
    StartupError as `start_engine` does.
    """
    decode = start_engine(settings, threads)
    prefill = load_second_engine(decode, settings.kv_cache_memory, CANARY_TOKENS, settings.expected_context)
    prefill.start()
    return prefill, decode
