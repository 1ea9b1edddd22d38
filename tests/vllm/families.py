"""Tiny random models of well-known families, with the demo's tokenizer, as directories."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    FalconH1Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    Llama4TextConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.engine.tiny_models import save

WINDOW: Final = 64
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 49_152,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
"""Sizes of all models. The vocabulary is that of the demo's tokenizer."""
HEADS: Final[dict[str, Any]] = {"num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 4}
"""Heads of 32 elements are the least that vLLM's attention on a CPU has."""
YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
"""Rotation as the released checkpoints of these families have it."""
LATENT: Final[dict[str, Any]] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
"""A latent vector of 512 + 64 elements is the only one that vLLM's kernel on a CPU has."""


def _deepseek_v3() -> PreTrainedConfig:
    return DeepseekV3Config(**SHAPE, **LATENT, n_group=2, topk_group=1)


def _kimi_k2() -> PreTrainedConfig:
    """DeepSeek V3 by another name, with one group of experts."""
    return DeepseekV3Config(**SHAPE, **LATENT, n_group=1, topk_group=1)


def _glm4_moe() -> PreTrainedConfig:
    """GLM-4.5: half of each head is rotated, queries and keys are normed and have biases."""
    return Glm4MoeConfig(
        **SHAPE,
        **HEADS,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        attention_bias=True,
        use_qk_norm=True,
    )


def _qwen3_moe() -> PreTrainedConfig:
    return Qwen3MoeConfig(**SHAPE, **HEADS, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2)


def _gpt_oss() -> PreTrainedConfig:
    """Every second layer has a window, and all heads have sinks."""
    return GptOssConfig(
        **SHAPE,
        **HEADS,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        rope_parameters=YARN | {"truncate": False},
    )


def _gemma3() -> PreTrainedConfig:
    """Three of four layers have a window, where they rotate otherwise."""
    return Gemma3TextConfig(
        **SHAPE,
        **HEADS,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        query_pre_attn_scalar=32,
    )


def _gemma4(
    by_layer: int = 32, layer_types: Sequence[str] = (*["sliding_attention"] * 3, "full_attention")
) -> PreTrainedConfig:
    """Layers without a window have fewer and longer heads, and so a KV group of their own."""
    return Gemma4TextConfig(
        **SHAPE,
        **HEADS,
        global_head_dim=64,
        num_global_key_value_heads=1,
        sliding_window=WINDOW,
        layer_types=list(layer_types),
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=SHAPE["vocab_size"],
        hidden_size_per_layer_input=by_layer,
    )


def _llama4() -> PreTrainedConfig:
    """Three of four layers attend within chunks of two pages."""
    return Llama4TextConfig(
        **SHAPE,
        **HEADS,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=WINDOW,
        moe_layers=[0, 1, 2, 3],
        attn_temperature_tuning=False,
    )


def _falcon_h1() -> PreTrainedConfig:
    """Each layer has attention and a state (Mamba 2)."""
    return FalconH1Config(
        **SHAPE,
        **HEADS,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
    )


def _qwen3_next() -> PreTrainedConfig:
    """Three of four layers have a state (gated delta rule), and all have experts."""
    return Qwen3NextConfig(
        **SHAPE,
        **HEADS,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
    )


def _gemma4_31b() -> PreTrainedConfig:
    """Without inputs of each layer, as the large ones. Both halves of the layers have both kinds."""
    return _gemma4(0, ["sliding_attention", "full_attention"] * 2)


FAMILIES: Final[dict[str, Callable[[], PreTrainedConfig]]] = {
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _kimi_k2,
    "glm4_moe": _glm4_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_31b": _gemma4_31b,
    "llama4": _llama4,
    "falcon_h1": _falcon_h1,
    "qwen3_next": _qwen3_next,
}
"""Configurations by the name of the family."""
LATENT_FAMILIES: Final = frozenset({"deepseek_v3", "kimi_k2"})
"""Families with multi-head latent attention."""
IN_BFLOAT16: Final = frozenset({"qwen3_next"})
"""Families that vLLM computes in bfloat16 alone on CPUs."""


def save_family(name: str, folder: Path, tokenizer: Path) -> Path:
    """Save a random model of the family `name` in `folder`, with the tokenizer in the directory `tokenizer`.

    Return its directory.
    """
    directory = save(FAMILIES[name](), folder / name)
    weights = load_file(directory / "model.safetensors")
    for path, weight in weights.items():
        if path.endswith("e_score_correction_bias"):  # the library starts them with zeros
            weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(7)) * 0.2
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, directory / file)
    if name == "kimi_k2":
        config = directory / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "kimi_k2"}))
    return directory
