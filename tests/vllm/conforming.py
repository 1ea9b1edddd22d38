"""Engines on vLLM for the conformance suite (`tests/inference/conformance`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from transformers import DeepseekV3Config, LlamaConfig

from baton.inference.step_engine import StepEngine
from tests.engine.tiny_models import SHAPE, save
from tests.vllm.conftest import PAGE_TOKENS, settings
from tests.vllm.families import LATENT


def _start(model: Path, page_tokens: int = PAGE_TOKENS) -> StepEngine:
    """Start an engine on `model`, with new rank groups: vLLM makes one of experts only if it needs one."""
    from vllm.distributed import destroy_model_parallel

    from baton.vllm.engine_startup import start_rank

    destroy_model_parallel()
    return start_rank(settings(str(model), page_tokens=page_tokens, kv_cache_memory=2**23), 1)


def _llama(folder: Path) -> StepEngine:
    """Heads of 32 elements are the least that vLLM's attention on a CPU has."""
    config = LlamaConfig(**{**SHAPE, "head_dim": 32}, tie_word_embeddings=False)
    return _start(save(config, folder / "model"))


def _latent(folder: Path) -> StepEngine:
    """Latent attention, with a rotation that is not scaled."""
    shape = {**SHAPE, **LATENT, "hidden_size": 64, "num_attention_heads": 4, "rope_parameters": None}
    config = DeepseekV3Config(**shape, n_group=2, topk_group=1)
    return _start(save(config, folder / "model"), page_tokens=16)


KINDS: Final[dict[str, Callable[[Path], StepEngine]]] = {"float32": _llama, "latent": _latent}
