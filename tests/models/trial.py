"""A trial of one model: whether Baton serves it, by which execution path, and whether its answers are equal
to `generate`'s.

A model whose answers are not equal has to be refused with a text that says why."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, GenerationConfig

from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.kv_cache import make_cache
from baton.engine.loading.engine_loading import load_engine
from baton.engine.loading.model_loading import load_model
from baton.engine.torch_engine import TorchEngine
from baton.inference.collectives import LocalCollectives, alone
from baton.runtime.errors import StartupError
from baton.topology import Topology
from tests.engine.executions import is_ours
from tests.engine.ranks import rank_scenarios
from tests.engine.ranks.rank_processes import Crew
from tests.engine.tiny_models import maker_of
from tests.models.comparison import (
    OUTPUT_TOKENS,
    SHORT,
    Answer,
    Outcome,
    TrialVerdict,
    apart,
    compare,
    prompts,
    why,
)

EAGER: Final = "eager"
SDPA: Final = "sdpa"
"""Attentions of the library's definitions. The first is the plainest, and every definition has it."""
SPLITS: Final = (Topology(2), Topology(1, 2))


def try_model(directory: Path, crew: Crew | None = None) -> Outcome:
    """Load the model in `directory` and hold its answers against the library's. `crew`: computes them as
    several ranks, too, where these can share the model."""
    try:
        engine = loaded(directory)
    except StartupError as refusal:
        return Outcome(TrialVerdict.REFUSED, why(str(refusal), directory))
    expected, told = generated(directory), ""
    with suppress(ValueError, ImportError):  # some definitions have no other attention
        others = generated(directory, SDPA)
        if next(apart("", others, expected), ""):
            told = "eager, where SDPA differs"
            if next(differences(engine, prompts(), expected), ""):
                expected, told = others, "SDPA, where eager differs"
    first, second = (why_not_split(directory, topology) for topology in SPLITS)
    shared = [topology for topology, words in zip(SPLITS, (first, second), strict=True) if not words]
    found = [differences(engine, prompts(), expected)]
    found += [over_ranks(crew, topology, directory, expected) for topology in shared if crew is not None]
    difference = next(chain(*found), "")
    if difference:
        return Outcome(TrialVerdict.WRONG, difference)
    sights = (*sights_of(engine), *([told] if told else []))
    return Outcome(TrialVerdict.EQUAL, way_of(engine), sights, (first, second))


def over_ranks(crew: Crew, topology: Topology, directory: Path, expected: Sequence[Answer]) -> Iterator[str]:
    """Yield a text if this many ranks answer with other tokens than `expected`."""
    told = crew.play(topology, rank_scenarios.answers, directory, prompts(), OUTPUT_TOKENS, (SHORT,), 2**24)
    tokens = [[token for token, _ in answer] for answer in expected]
    if any(each["outputs"] != [tokens] for each in told):
        yield f"over {topology.tensor} ranks of {topology.pipeline} stages: other tokens"


def loaded(directory: Path) -> TorchEngine:
    return load_engine(directory, dtype="float32", device="cpu", kv_cache_memory=2**24, threads=1)


def why_not_split(directory: Path, topology: Topology) -> str:
    """Return the refusal of the model by several ranks, or an empty text if each loads its share."""
    try:
        for rank in range(topology.ranks):
            load_model(directory, "float32", "cpu", LocalCollectives(topology, rank))
    except StartupError as refusal:
        return why(str(refusal), directory)
    return ""


def way_of(engine: TorchEngine) -> str:
    if engine.execution.kind is ExecutionKind.ROW_BY_ROW:
        return "the library's definition, row by row"
    return "our own pass" if is_ours(engine) else "the library's definition"


def sights_of(engine: TorchEngine) -> Iterator[str]:
    layers = engine.model.attention.values()
    spans = [each.span for each in layers if each.span is not None]
    if any(not span.in_chunks for span in spans):
        yield "windows"
    if any(span.in_chunks for span in spans):
        yield "chunks"
    if engine.model.geometry.latent is not None:
        yield "latents"
    if engine.model.geometry.states:
        yield "states"
    if any(each.softcap is not None for each in layers):
        yield "soft caps"
    if any(each.sinks is not None for each in layers):
        yield "sinks"


def differences(
    engine: TorchEngine, asked: Sequence[Sequence[int]], expected: Sequence[Answer]
) -> Iterator[str]:
    """Yield each setting in which the engine's answers differ from `expected`, as `compare` does."""
    return compare(engine, beside(engine), asked, expected)


def beside(engine: TorchEngine) -> TorchEngine:
    """Return an engine of the same model over other pages, which stores no state for the next step."""
    caches = [make_cache(each.group, each.pages, engine.model.device) for each in engine.caches]
    execution = engine.execution
    return TorchEngine(engine.model, engine.whole, caches, alone(), execution, execution.runner(caches))


def generated(directory: Path, attention: str = EAGER) -> list[Answer]:
    """Return the answers of the library's `generate`, each prompt alone. `attention`: implementation that it
    uses."""
    model = _reference(directory, attention)
    settings = GenerationConfig(max_new_tokens=OUTPUT_TOKENS, do_sample=False, pad_token_id=0)
    return [list(_continued(model, prompt, settings)) for prompt in prompts()]


def _continued(model: Any, prompt: Sequence[int], settings: GenerationConfig) -> Iterator[tuple[int, float]]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        told = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            output_logits=True,
            return_dict_in_generate=True,
        )
    for token, logits in zip(told.sequences[0, len(prompt) :].tolist(), told.logits, strict=True):
        yield token, float(torch.log_softmax(logits[0].float(), -1)[token])


def _reference(directory: Path, attention: str) -> Any:
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    made = maker_of(config).from_pretrained(
        directory, dtype=torch.float32, attn_implementation=attention, local_files_only=True
    )
    return made.eval()
