"""Start of a worker's engine on vLLM. vLLM is imported by the calls, and its environment is set before."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from baton.inference.collectives import Collectives, alone
from baton.inference.process_group import join_default_group
from baton.inference.rank_startup import start_with_ranks
from baton.inference.step_engine import StepEngine
from baton.models.engine_features import missing_in_vllm
from baton.models.model_facts import read_model
from baton.models.model_files import prepare, resolve
from baton.runtime.errors import StartupError, describe_error
from baton.runtime.logging import Log
from baton.runtime.memory_trimming import trimming_memory
from baton.runtime.model_options import LoadFormat, Quantize
from baton.runtime.worker_settings import WorkerSettings
from baton.topology import Topology
from baton.vllm.environment import prepare_environment

log = Log(__name__)


def start_rank(settings: WorkerSettings, threads: int) -> StepEngine:
    """Start the engine of the rank in `settings`. Raises as `start_engine` does, and GroupLost."""
    return start_with_ranks(settings, partial(start_engine, settings, threads))


@trimming_memory()
def start_engine(
    settings: WorkerSettings,
    threads: int,
    topology: Topology | None = None,
    rank: int = 0,
    rank_group: Collectives | None = None,
) -> StepEngine:
    """Find, prepare and load the model, or the part of `rank`, allocate its KV cache, and run a first step.

    Blocks for seconds. Raises StartupError for a missing or unsupported model, or too little memory, and
    RankGroupBroken if another rank does not come up.
    """
    refuse_settings(settings)
    prepare_environment()
    torch.set_num_threads(threads)
    source = resolve(settings.model, LoadFormat(settings.load_format), missing_in_vllm)
    directory = prepare(source, lambda line: log.info("preparing the model", step=line))
    dummy = settings.load_format == LoadFormat.DUMMY.value
    facts = read_model(directory, dummy=dummy, context_length=settings.context_length)
    from baton.vllm.loading import load_engine

    rank_group = alone() if rank_group is None else rank_group
    join_default_group(settings.rendezvous, topology or Topology(), rank)
    engine = load_engine(settings, directory, facts, rank_group)
    with refusals(facts.name):
        engine.start()
    for number, cache in enumerate(engine.caches):
        group = cache.group
        log.info(
            "KV memory ready",
            group=number,
            kind=group.kind.value,
            layers=len(group.layers),
            pages=cache.pages,
            bytes=cache.length,
            dtype=group.dtype,
            encoding=group.encoding,
        )
    tokens = min(cache.tokens for cache in engine.caches)
    log.info("engine ready", tokens=tokens, device=str(engine.device))
    return engine


def start_both(settings: WorkerSettings, threads: int) -> tuple[StepEngine, StepEngine]:
    """Start prefill's and decode's engine over one copy of the weights. Raises as `start_engine` does."""
    decode = start_engine(settings, threads)
    from baton.vllm.loading import load_second_engine

    prefill = load_second_engine(decode)
    prefill.start()
    return prefill, decode


@contextmanager
def refusals(model: str) -> Iterator[None]:
    """Context in which vLLM's errors in a first step are refusals of `model`, with vLLM's own reason.

    A build has no kernels for some layers, or only in some number formats. Raises StartupError.
    """
    try:
        yield
    except (AssertionError, AttributeError, NotImplementedError, RuntimeError) as error:
        raise StartupError(
            f"vLLM does not compute the model {model} here: {describe_error(error)}"
        ) from error


def refuse_settings(settings: WorkerSettings) -> None:
    """Raise StartupError, naming all settings that this engine cannot follow."""
    refused = []
    if settings.quantize != Quantize.NONE.value:
        refused.append(f"--quantize {settings.quantize}: vLLM loads quantized checkpoints as they are")
    if settings.draft_model is not None:
        refused.append(f"--speculate model:{settings.draft_model.model}: drafts are of the form ngram:N")
    if refused:
        raise StartupError(f"--engine vllm does not follow {'; '.join(refused)}")
