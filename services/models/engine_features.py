"""Features of a model that an engine lacks, by engine, judged by the words of the model's files.

No engine is imported, so that a model is refused before anything is started. What only a loaded definition
shows, the engine refuses when it loads it.
"""

from collections.abc import Callable
from typing import Final

from baton.models.checkpoint_quantization import CheckpointQuantization
from baton.models.model_requirements import (
    CONVOLUTIONS,
    ENCODER,
    HYBRID,
    LATER,
    LINEAR,
    ONE_TEXT,
    STATES,
    Json,
    needs_of,
    other_heads,
    own_caches,
)

MissingFeatures = Callable[[Json, CheckpointQuantization | None], list[str]]
"""(configuration, quantization of the checkpoint) -> what an engine lacks for the model, in a few words
each."""

STATE_FEATURES: Final = frozenset({STATES, LINEAR, HYBRID, CONVOLUTIONS})
"""Features of models whose layers store states. The torch engine has them, with the transformers library's
common cache."""
VLLM_LACKS: Final = frozenset({ENCODER, LATER, ONE_TEXT})
"""Features that the engine on vLLM lacks, since its pages hold what a sequence keeps of earlier tokens
alone."""
REPEATED: Final = "attention heads that are experts"
"""Feature of JetMoE. Its keys are repeated for each expert, and vLLM takes them for keys of other tokens."""


def missing_in_all(config: Json, _: CheckpointQuantization | None) -> list[str]:
    """Return what no kind of engine could serve: a head that draws no text.

    The bootstrap judges a model by this alone, since it does not know the workers' engine.
    """
    return other_heads(config)


def missing_in_torch(config: Json, quantization: CheckpointQuantization | None) -> list[str]:
    """Return what the torch engine lacks."""
    needs = [need for need in needs_of(config) if need not in STATE_FEATURES]
    return [*own_caches(config), *needs, *(() if quantization is None else quantization.missing)]


def missing_in_vllm(config: Json, _: CheckpointQuantization | None) -> list[str]:
    """Return what the engine on vLLM lacks. Definitions and quantizations are vLLM's own."""
    lacked = VLLM_LACKS | set(other_heads(config))
    repeated = [REPEATED] if config.get("model_type") == "jetmoe" else []
    return [need for need in needs_of(config) if need in lacked] + repeated
