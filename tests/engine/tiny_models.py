"""Small random models of several architectures, with every feature that our attention has to support."""

from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    ApertusConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    JetMoeConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY: Final = 131
CONTEXT: Final = 512
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

LATENT_SHAPE: Final[dict[str, Any]] = {
    **{key: size for key, size in SHAPE.items() if key != "head_dim"},
    "num_key_value_heads": 6,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Sizes of models whose heads share latents of 20 + 16 elements, with experts in two groups."""

ARCHITECTURES: Final[dict[str, PreTrainedConfig]] = {
    "llama-gqa-untied": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama-mha-tied": LlamaConfig(**{**SHAPE, "num_key_value_heads": 6}, tie_word_embeddings=True),
    "qwen2-biased": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3-query-key-norm": Qwen3Config(**SHAPE, tie_word_embeddings=False),
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2),
    "mistral-no-window": MistralConfig(**SHAPE, sliding_window=None),
    "mistral-window-beyond-context": MistralConfig(**SHAPE, sliding_window=CONTEXT),
    "ministral3-queries-longer-by-position": Ministral3Config(
        **SHAPE,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "qwen3-yarn-by-the-vendors-recipe": Qwen3Config(
        **{**SHAPE, "max_position_embeddings": 32},
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": CONTEXT / 32,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama-biased-two-kv-heads": LlamaConfig(
        **{**SHAPE, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 8},
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
    "gemma-one-kv-head": GemmaConfig(**{**SHAPE, "num_key_value_heads": 1, "head_dim": 32}),
    "granite-own-scaling": GraniteConfig(**SHAPE, attention_multiplier=0.4),
    "granite-factors-near-one": GraniteConfig(**SHAPE, logits_scaling=1.05),
    "apertus-numbers-of-no-dimension": ApertusConfig(
        **SHAPE, hidden_act="xielu", rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
    ),
    "deepseek-v3-latents": DeepseekV3Config(**LATENT_SHAPE, tie_word_embeddings=False),
    "jetmoe-views-of-attention": JetMoeConfig(
        **{key: value for key, value in SHAPE.items() if key not in ("num_attention_heads", "head_dim")},
        kv_channels=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "gpt2-learned-positions": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=48,
        n_layer=3,
        n_head=4,
        n_positions=CONTEXT,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    ),
}


@cache
def saved(name: str, root: Path) -> Path:
    """Return the directory of the model of that architecture, saved below `root`."""
    return save(ARCHITECTURES[name], root / name)


def maker_of(config: PreTrainedConfig) -> Any:
    """Return the library's class that makes a model of `config`."""
    return (
        AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    )


def save(config: PreTrainedConfig, directory: Path, weights: torch.dtype = torch.float32) -> Path:
    """Save a random model of `config` in `directory`, always the same, in float32 with values of the dtype
    `weights`."""
    torch.manual_seed(7)
    model = maker_of(config).from_config(config, dtype=torch.float32)
    for path, weight in model.named_parameters():
        if path.endswith(("bias", "sinks")):  # the library starts them with zeros
            weight.data += torch.randn_like(weight) * 0.2
        weight.data = weight.data.to(weights).float()
    model.save_pretrained(directory)
    return directory
