"""Tiny models for vLLM's engine: those of `tests/models/recipes.py` in sizes that vLLM's attention has."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from baton.models.model_facts import CONFIG_FILE, SINGLE_FILE
from tests.models.recipes import EMPTY, VOCABULARY, Size, recipe, save

SIZE: Final = Size(hidden=128, head=32, latent=False)
"""Heads of 32 elements are the least that vLLM's attention on a CPU has, and released latents the only
ones."""
NO_WINDOWS: Final[Mapping[str, Any]] = {
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 4,
}
FURTHER: Final[Mapping[str, Mapping[str, Any]]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [6, 6, 4]}
        }
    },
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "axk1": {"first_k_dense_replace": 0},
    "falcon": {"ffn_hidden_size": 512},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 32,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
        "pad_token_id": 1,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 32,
        "num_experts": None,
    },
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": {"first_k_dense_replace": 1, "head_dim": 64},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 32, "route_norm": True, "qk_norm": True},
    "llama4_text": {"moe_layers": [0, 1, 2, 3], "num_experts_per_tok": 1},
    "lfm2": {
        "conv_dim": 128,
        "block_dim": 128,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 1, "state_size": 32},
    "minicpm3": {"num_key_value_heads": 4},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "qwen2": NO_WINDOWS,
    "qwen3": NO_WINDOWS,
    "qwen3_next": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
"""Fields by type: those that vLLM reads from the files of released models and the library does not have, and
windows as they are released, since vLLM has no types of layers for Qwen."""
RELATIVES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "DeepseekForCausalLM": (
        "glm4_moe",
        {
            "head_dim": 32,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "qk_nope_head_dim": 0,
            "qk_rope_head_dim": 0,
        },
    ),
    "ExaoneForCausalLM": (
        "llama",
        {"num_layers": 4, "layer_norm_epsilon": 1e-6, "activation_function": "silu"},
    ),
    **dict.fromkeys(
        ("IQuestCoderForCausalLM", "InternLM3ForCausalLM", "LLaMAForCausalLM", "TeleChat3ForCausalLM"),
        ("llama", EMPTY),
    ),
    "InternLM2ForCausalLM": ("llama", {"bias": False}),
    "MiMoForCausalLM": ("qwen2", NO_WINDOWS),
    "MiniCPMForCausalLM": (
        "llama",
        {"scale_emb": 2.0, "scale_depth": 1.4, "dim_model_base": 64, "num_experts": 0},
    ),
    "OrionForCausalLM": ("stablelm", {"use_qkv_bias": False, "rms_norm_eps": 1e-5}),
    "PanguEmbeddedForCausalLM": ("llama", {"attention_bias": True}),
    "Rnj1ForCausalLM": ("gemma3_text", EMPTY),
    "SolarForCausalLM": (
        "llama",
        {"bskcn_1": [1], "bskcn_2": [2], "bskcn_3": [2], "bskcn_4": [3], "bskcn_tv": [0.9, 0.8]},
    ),
    "TeleFLMForCausalLM": (
        "llama",
        {"use_mup": True, "input_mult": 1.0, "output_mult": 2.0, "mup_scale_factor": 4.0},
    ),
    "kimi_k2": ("deepseek_v3", FURTHER["deepseek_v3"]),
}
"""Architectures of vLLM, and a type, that the library does not have: the type whose weights they have, and
further fields."""
RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "ExaoneForCausalLM": {
        "model.embed_tokens": "transformer.wte",
        "model.layers": "transformer.h",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn": "attn.attention",
        "gate_proj": "c_fc_0",
        "up_proj": "c_fc_1",
        "down_proj": "c_proj",
        "model.norm": "transformer.ln_f",
    },
    "InternLM2ForCausalLM": {
        "embed_tokens": "tok_embeddings",
        "self_attn.q_proj.weight": "attention.wqkv.weight#1",
        "self_attn.k_proj.weight": "attention.wqkv.weight#2",
        "self_attn.v_proj.weight": "attention.wqkv.weight#3",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "lm_head": "output",
    },
}
"""Other names of weights, by architecture. Those with # are parts of one weight."""


def save_model(kind: str, directory: Path) -> None:
    """Save a tiny model of a type, or of an architecture of `RELATIVES`, in `directory`.

    Raises the library's error if there is none.
    """
    base, further = RELATIVES.get(kind, (kind, FURTHER.get(kind, EMPTY)))
    save(recipe(base, SIZE, further), directory)
    if kind in RELATIVES:
        file = directory / CONFIG_FILE
        stated = {"architectures": [kind]} if kind.endswith("ForCausalLM") else {"model_type": kind}
        file.write_text(json.dumps(json.loads(file.read_text()) | stated))
    if kind in RENAMED:
        weights = load_file(directory / SINGLE_FILE)
        for old, new in RENAMED[kind].items():
            weights = {name.replace(old, new): weight for name, weight in weights.items()}
        parts: dict[str, list[torch.Tensor]] = defaultdict(list)
        for name, weight in sorted(weights.items()):
            parts[name.partition("#")[0]].append(weight)
        whole = {name: torch.cat(each) for name, each in parts.items()}
        save_file(whole, directory / SINGLE_FILE, {"format": "pt"})
