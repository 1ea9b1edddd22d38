"""Engines on vLLM for the conformance suite (`tests/inference/conformance`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from transformers import DeepseekV3Config, LlamaConfig

from baton.inference.step_engine import StepEngine
from tests.engine.tiny_models import SHAPE, save
from tests.vllm.conftest import settings
from tests.vllm.families import LATENT


def _llama(folder: Path) -> StepEngine:
    """Heads of 32 elements are the least that vLLM's attention on a CPU has."""
    from baton.vllm.engine_startup import start_rank

    config = LlamaConfig(**{**SHAPE, "head_dim": 32}, tie_word_embeddings=False)
    return start_rank(settings(str(save(config, folder / "model")), kv_cache_memory=2**23), 1)


def _latent(folder: Path) -> StepEngine:
    """Latent attention, with a rotation that is not scaled."""
    from baton.vllm.engine_startup import start_rank

    shape = {**SHAPE, **LATENT, "hidden_size": 64, "num_attention_heads": 4, "rope_parameters": None}
    config = DeepseekV3Config(**shape, n_group=2, topk_group=1)
    return start_rank(settings(str(save(config, folder / "model")), page_tokens=16, kv_cache_memory=2**23), 1)


KINDS: Final[dict[str, Callable[[Path], StepEngine]]] = {"float32": _llama, "latent": _latent}
