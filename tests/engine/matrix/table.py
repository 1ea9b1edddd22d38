"""Table of model types that are computed right, with their features and executions.

A row is a tiny model of random weights: what its type is released with is on, and its windows and chunks are
so short that prompts of a few hundred tokens are far behind their borders.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import transformers
from transformers import PreTrainedConfig

from tests.engine import tiny_models

WINDOW: Final = 64
SHAPE: Final[dict[str, Any]] = {**tiny_models.SHAPE, "sliding_window": WINDOW}
FOUR: Final[dict[str, Any]] = {**SHAPE, "num_hidden_layers": 4}
OWN: Final = "own"
"""Name of the execution by our decoder, `services/engine/execution/fused_decoder.py`."""
LIBRARY: Final = "library"
"""Name of the execution by the library's definition with our attention."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the table of models."""

    make: Callable[[], PreTrainedConfig]
    way: str
    sees: tuple[str, ...]
    """Span of each layer: "all", or its window or chunk."""
    on: tuple[str, ...] = ()
    """Other features that are on: "cap", "sinks"."""


def _of(kind: str, **options: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: getattr(transformers, kind)(**options)


def _container(
    kind: str, text: str, options: Mapping[str, Any], **beside: Any
) -> Callable[[], PreTrainedConfig]:
    """Return a multimodal configuration with such a text model and the smallest encoder."""
    return lambda: getattr(transformers, kind)(
        text_config=getattr(transformers, text)(**options).to_dict(), **beside
    )


ALL: Final = "all"
SEEN: Final = f"window {WINDOW}"
CHUNK: Final = f"chunk {WINDOW}"
ROTATED: Final = {"rope_type": "default", "rope_theta": 10_000.0}
MROPE: Final = {**ROTATED, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
GEMMA: Final[dict[str, Any]] = {
    **FOUR,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "query_pre_attn_scalar": 16,
}
LLAMA4: Final[dict[str, Any]] = {
    **tiny_models.SHAPE,
    "num_hidden_layers": 4,
    "attention_chunk_size": WINDOW,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "floor_scale": 48,
    "attn_scale": 0.5,
}
YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT: Final[dict[str, Any]] = {**tiny_models.LATENT_SHAPE, "rope_parameters": YARN}
LONGER: Final[dict[str, Any]] = {**YARN, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 16 / 40}
PIXTRAL: Final[dict[str, Any]] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 8,
}
SIGLIP: Final[dict[str, Any]] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
QWEN_TOWER: Final[dict[str, Any]] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 48,
    "deepstack_visual_indexes": [0],
}
QWEN25_TOWER: Final[dict[str, Any]] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 48,
    "fullatt_block_indexes": [0],
}
LLAMA4_TOWER: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vision_output_dim": 32,
    "image_size": 32,
    "patch_size": 8,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
INTERN_TOWER: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": [32, 32],
    "patch_size": [8, 8],
}

TYPES: Final[dict[str, Entry]] = {
    "mistral, window": Entry(_of("MistralConfig", **SHAPE), OWN, (SEEN,) * 3),
    "qwen2, windows from a layer on": Entry(
        _of("Qwen2Config", **SHAPE, use_sliding_window=True, max_window_layers=1), OWN, (ALL, SEEN, SEEN)
    ),
    "qwen3, windows from a layer on": Entry(
        _of("Qwen3Config", **SHAPE, use_sliding_window=True, max_window_layers=1), OWN, (ALL, SEEN, SEEN)
    ),
    "phi3, window": Entry(
        _of("Phi3Config", **{**SHAPE, "head_dim": 8, "pad_token_id": 0}), LIBRARY, (SEEN,) * 3
    ),
    "starcoder2, window": Entry(_of("Starcoder2Config", **SHAPE), LIBRARY, (SEEN,) * 3),
    "gemma2": Entry(
        _of(
            "Gemma2Config",
            **SHAPE,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0,
        ),
        LIBRARY,
        (SEEN, ALL, SEEN),
        ("cap",),
    ),
    "gemma3": Entry(_of("Gemma3TextConfig", **GEMMA), LIBRARY, (SEEN, SEEN, SEEN, ALL)),
    "olmo3": Entry(_of("Olmo3Config", **FOUR), LIBRARY, (SEEN, SEEN, SEEN, ALL)),
    "command a": Entry(_of("Cohere2Config", **FOUR, logit_scale=0.8), LIBRARY, (SEEN, SEEN, SEEN, ALL)),
    "gpt-oss": Entry(
        _of("GptOssConfig", **{**FOUR, "num_local_experts": 4, "num_experts_per_tok": 2}),
        LIBRARY,
        (SEEN, ALL, SEEN, ALL),
        ("sinks",),
    ),
    "granite, windows and sinks": Entry(
        _of("GraniteSWAConfig", **FOUR), LIBRARY, (ALL, SEEN, SEEN, SEEN), ("sinks",)
    ),
    "deepseek v3": Entry(_of("DeepseekV3Config", **LATENT), LIBRARY, (ALL,) * 3),
    "deepseek v2, queries not compressed": Entry(
        _of("DeepseekV2Config", **{**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"}),
        LIBRARY,
        (ALL,) * 3,
    ),
    "text of mistral small 4": Entry(
        _container(
            "Mistral3Config",
            "Mistral4Config",
            {**LATENT, "rope_parameters": LONGER},
            vision_config=PIXTRAL,
        ),
        LIBRARY,
        (ALL,) * 3,
    ),
    "llama 4, chunks, scaled by length": Entry(
        _of("Llama4TextConfig", **LLAMA4), LIBRARY, (CHUNK, CHUNK, CHUNK, ALL)
    ),
    "text of gemma3": Entry(
        _container("Gemma3Config", "Gemma3TextConfig", GEMMA, vision_config=SIGLIP, mm_tokens_per_image=4),
        LIBRARY,
        (SEEN, SEEN, SEEN, ALL),
    ),
    "text of mistral small": Entry(
        _container("Mistral3Config", "MistralConfig", tiny_models.SHAPE, vision_config=PIXTRAL),
        OWN,
        (ALL,) * 3,
    ),
    "text of qwen3-vl": Entry(
        _container(
            "Qwen3VLConfig",
            "Qwen3VLTextConfig",
            {**tiny_models.SHAPE, "rope_parameters": MROPE},
            vision_config=QWEN_TOWER,
        ),
        OWN,
        (ALL,) * 3,
    ),
    "text of qwen2.5-vl": Entry(
        _container(
            "Qwen2_5_VLConfig",
            "Qwen2_5_VLTextConfig",
            {**SHAPE, "head_dim": None, "rope_parameters": {**ROTATED, "mrope_section": [1, 1, 2]}},
            vision_config=QWEN25_TOWER,
        ),
        OWN,
        (ALL,) * 3,
    ),
    "text of llama 4": Entry(
        _container("Llama4Config", "Llama4TextConfig", LLAMA4, vision_config=LLAMA4_TOWER),
        LIBRARY,
        (CHUNK, CHUNK, CHUNK, ALL),
    ),
    "text of internvl": Entry(
        _container("InternVLConfig", "Qwen2Config", tiny_models.SHAPE, vision_config=INTERN_TOWER),
        OWN,
        (ALL,) * 3,
    ),
}
