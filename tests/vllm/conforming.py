"""Engines on vLLM for the conformance suite (`tests/inference/conformance`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from transformers import LlamaConfig

from baton.inference.step_engine import StepEngine
from tests.engine.tiny_models import SHAPE, save
from tests.vllm.conftest import settings


def _llama(folder: Path) -> StepEngine:
    """Heads of 32 elements are the least that vLLM's attention on a CPU has."""
    from baton.vllm.engine_startup import start_rank

    config = LlamaConfig(**{**SHAPE, "head_dim": 32}, tie_word_embeddings=False)
    return start_rank(settings(str(save(config, folder / "model")), kv_cache_memory=2**23), 1)


KINDS: Final[dict[str, Callable[[Path], StepEngine]]] = {"float32": _llama}
