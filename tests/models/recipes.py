"""A tiny configuration for each model type of the model library.

It starts from the defaults of the type, which are those of the released model. Fields that decide the size
are made small, by their names. All others stay as released: norms, biases, soft caps, sinks, scaled rotations
and the pattern of layers. Windows and chunks are so short that a prompt of a few hundred tokens is longer
than several of them. `BESIDE` has further fields for the types that need them."""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.engine.tiny_models import maker_of

VOCABULARY: Final = 131
CONTEXT: Final = 512
WINDOW: Final = 64
LAYERS: Final = 4
HEADS: Final = 4
SPREAD: Final = 0.3
"""Standard deviation of random weights, large enough that the drawn tokens vary."""
PARAMETERS_MAX: Final = 100_000_000

Fields = dict[str, Any]

REACHES: Final = ("sliding_window", "attention_chunk_size", "window_size")
"""Fields that are a window's length. They are set where the released model sets them."""
DECODER: Final[Fields] = {"is_decoder": True, "is_encoder_decoder": False}
"""Fields that reduce an encoder-decoder model to its decoder, which draws the text."""
TEXT: Final[Fields] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp"), 96
    ),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "dense_intermediate_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    "encoder_layers": 1,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), HEADS),
    "encoder_attention_heads": HEADS,
    "num_key_value_heads": 2,
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"), CONTEXT
    ),
    **dict.fromkeys(("initializer_range", "init_std"), SPREAD),
    **dict.fromkeys(REACHES, WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    "linear_num_key_heads": 2,
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    "floor_scale": 48,
    "bos_token_id": None,
    "eos_token_id": None,
    "forced_eos_token_id": None,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
"""Fields that decide the size of a language model, and those that keep it from ending an answer. `Size` has
the others."""
LATENT: Final[Fields] = {
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 40,
    "v_head_dim": 12,
}
"""Fields that decide the size of latents, and of heads of keys and values made of them."""
TOWER: Final[Fields] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "d_model", "projection_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "num_layers"), 1),
    **dict.fromkeys(
        ("num_attention_heads", "num_heads", "encoder_attention_heads", "num_key_value_heads"), 2
    ),
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "mlp_ratio": 1,
    "vision_output_dim": 32,
    **dict.fromkeys(("projector_input_dim", "projector_output_dim"), 48),
    "encoder_ffn_dim": 32,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "num_mel_bins": 16,
    "base_channels": 32,
    "num_embeddings": 64,
    "max_source_positions": 64,
    "vision_feature_layer": -1,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
"""Fields that decide the size of a container model's other parts, such as its vision tower. Baton drops those
parts."""

QWEN_WINDOWS: Final[Fields] = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
}
LENGTH: Final[Fields] = {"max_position_embeddings": CONTEXT}
"""The length of a context, for types whose configuration has none."""
HYBRIDS: Final[Fields] = {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]}
BESIDE: Final[Mapping[str, Fields]] = {
    "bamba": {"attn_layer_indices": [2]},
    "falcon_mamba": LENGTH,
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    },
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "mamba": LENGTH,
    "mamba2": LENGTH,
    "zamba": HYBRIDS,
    "zamba2": HYBRIDS,
    "zaya": {"num_experts_per_tok": 1},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e4}}
    },
    "bloom": {"seq_length": CONTEXT},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 500_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "laguna": {"layer_types": ["full_attention"] + ["sliding_attention"] * 3},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "longcat_flash": {"zero_expert_num": 3},
    "mellum": {"layer_types": ["full_attention"] + ["sliding_attention"] * 3},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "phi3": {"sliding_window": WINDOW},
    "reformer": {"attn_layers": ["local", "lsh", "local", "lsh"], "axial_pos_embds_dim": [16, 48]},
    "qwen2": QWEN_WINDOWS,
    "qwen3": QWEN_WINDOWS,
    "starcoder2": {"sliding_window": WINDOW},
}
"""Further fields of some types, mostly those that their checkpoints set and their defaults do not."""


@dataclass(frozen=True, slots=True)
class Size:
    """Elements of the vectors of a language model of 4 heads."""

    hidden: int = 64
    head: int = 16
    latent: bool = True
    """Whether latents are small, too, and not as they are released."""

    @property
    def text(self) -> Fields:
        """Fields that decide the size of a language model."""
        hidden = ("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim")
        head = ("head_dim", "kv_channels", "query_pre_attn_scalar")
        widths = dict.fromkeys(hidden, self.hidden) | dict.fromkeys(head, self.head)
        inner = ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim")
        widths |= dict.fromkeys((*inner, "mamba_d_head", "mamba_head_dim"), self.head)
        widths |= dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 2 * self.hidden // self.head)
        widths |= {"mamba_d_ssm": 2 * self.hidden}
        return TEXT | widths | {"rotary_dim": self.head // 2} | (LATENT if self.latent else {})

    @property
    def tower(self) -> Fields:
        """Fields that decide the size of other parts."""
        return TOWER | {"out_hidden_size": self.hidden}

    def beside(self, kind: str) -> Fields:
        """Return the further fields of a type."""
        fields = dict(BESIDE.get(kind, {}))
        if "ffn_config" in fields:
            fields["ffn_config"] = {"hidden_size": self.hidden, **fields["ffn_config"]}
        if kind == "mamba2":
            fields["num_heads"] = 2 * self.hidden // self.head
        if "axial_pos_embds_dim" in fields:
            fields["axial_pos_embds_dim"] = [16, self.hidden - 16]
        return fields


SMALL: Final = Size()
EMPTY: Final[Mapping[str, Any]] = {}


def causal_types() -> list[str]:
    """Return every type for which the library has a causal language model."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def container_types() -> list[str]:
    """Return every type of models that read images, too, around a language model of its own."""
    return [kind for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if is_container(kind)]


def released(kind: str) -> PreTrainedConfig:
    """Return the configuration with which this type is released. A type with an encoder has its decoder
    alone."""
    made = CONFIG_MAPPING[kind]
    whole = made()
    alone = {key: value for key, value in DECODER.items() if _has(whole, key)}
    return made(**alone) if getattr(whole, "is_encoder_decoder", False) and kind in causal_types() else whole


def is_container(kind: str) -> bool:
    whole = CONFIG_MAPPING[kind]()
    return whole.get_text_config() is not whole


def recipe(kind: str, size: Size = SMALL, further: Mapping[str, Any] = EMPTY) -> PreTrainedConfig:
    """Return the type's tiny configuration. Raises the library's error if it has no model of such a size.

    `further`: fields of a text model beside those of `size`.
    """
    made, whole = CONFIG_MAPPING[kind], CONFIG_MAPPING[kind]()
    if whole.get_text_config() is whole:
        small = _small(whole, size.text | DECODER, {**size.beside(kind), **further})
        return _taken(made, _parts(whole, size) | small)
    return _taken(made, _parts(whole, size, whole.get_text_config()) | size.beside(kind))


def _parts(
    whole: PreTrainedConfig, size: Size, text: PreTrainedConfig | None = None, is_text: bool = False
) -> Fields:
    """The configurations that `whole` is made of, each of them small: `text` as a language model, and all of
    them if `is_text`."""
    parts: Fields = {}
    for key in type(whole).sub_configs:
        part = getattr(whole, key, None)
        if isinstance(part, PreTrainedConfig):
            in_text = is_text or part is text
            sizes, head = (size.text, size.head) if in_text else (size.tower, 0)
            inner = _parts(part, size, is_text=in_text)
            small = inner | _small(part, sizes, size.beside(part.model_type), head)
            parts[key] = {**_taken(type(part), small).to_dict(), "model_type": part.model_type}
    return parts


def _taken(made: type[PreTrainedConfig], fields: Fields) -> PreTrainedConfig:
    """The configuration of these `fields`. One that the type does not take so is given in another form, and
    left as it is released where there is none."""
    forms: dict[str, list[Any]] = {}
    while True:
        try:
            return made(**fields)
        except StrictDataclassFieldValidationError as error:
            [field] = re.findall(r"for field '(\w+)'", str(error))
            if field not in fields:
                raise
            others = forms.setdefault(field, _forms(fields.pop(field)))
            if others:
                fields[field] = others.pop(0)


def _forms(value: Any) -> list[Any]:
    if value is None:
        return [1]
    return [float(value), [value] * 2] if isinstance(value, int) else []


def _small(released: PreTrainedConfig, sizes: Fields, beside: Fields, head: int = 0) -> Fields:
    """The fields that make `released` small: of its own, those of `sizes`, and all of `beside`. `head`:
    elements of a head whose rotation is scaled, if it is to be."""
    fields = {key: value for key, value in sizes.items() if _has(released, key)}
    if "kv_lora_rank" in fields:  # all heads share latents
        fields["num_key_value_heads"] = HEADS
    for key in REACHES:
        if not isinstance(getattr(released, key, None), int):
            fields.pop(key, None)
    layers = getattr(released, "num_hidden_layers", None)
    for key, value in _lists(released):
        if len(value) == layers:
            fields[key] = patterned(value, fields.get("num_hidden_layers", layers))
    turns = getattr(released, "rope_parameters", None)
    if isinstance(turns, dict) and head:
        if "mrope_section" in _source_of(released):
            turns = {"mrope_section": [2, 1, 1], **turns}
        fields["rope_parameters"] = _turned(turns, fields.get("head_dim") or head)
    return {**fields, **beside}


def _source_of(released: PreTrainedConfig) -> str:
    """Return the source of the modeling file beside the configuration's file."""
    module = type(released).__module__.replace("configuration_", "modeling_")
    __import__(module)
    return inspect.getsource(sys.modules[module])


def _has(released: PreTrainedConfig, key: str) -> bool:
    if isinstance(getattr(type(released), key, None), property):
        return False
    try:
        return hasattr(released, key)
    except Exception:  # of a type whose layers differ, the library's own
        return False


def _lists(released: PreTrainedConfig) -> Iterator[tuple[str, Sequence[Any]]]:
    return ((key, value) for key, value in vars(released).items() if isinstance(value, list) and value)


def patterned(released: Sequence[Any], count: int) -> list[Any]:
    """Return one value for each of `count` layers. They are the first released ones, of which the last make
    room for kinds that are missing."""
    kinds = [value for place, value in enumerate(released) if value not in released[:place]]
    chosen = list(released[:count])
    missing = [kind for kind in kinds if kind not in chosen][: count - 1]
    return [*chosen[: count - len(missing)], *missing]


def _turned(turns: Fields, head_dim: int) -> Fields:
    """Return rotary settings as released, with their sections scaled to a head of `head_dim` dimensions."""
    told = {
        key: _turned(value, head_dim) if isinstance(value, dict) else value for key, value in turns.items()
    }
    sections, share = told.get("mrope_section"), told.get("partial_rotary_factor", 1)
    if isinstance(sections, list) and isinstance(share, int | float):
        half = int(head_dim * share) // 2
        scaled = [max(part * half // sum(sections), 1) for part in sections[1:]]
        told["mrope_section"] = [half - sum(scaled), *scaled]
    return told


class TooLarge(ValueError):
    """Raised when a recipe leaves a model large."""


def save(config: PreTrainedConfig, directory: Path) -> Path:
    """A random model of `config` in `directory`, always the same, in float32, of which nothing is as it is
    started: norms, biases and sinks are no ones and zeros. Raises TooLarge."""
    with torch.device("meta"):
        count = sum(each.numel() for each in maker_of(config).from_config(config).parameters())
    if count > PARAMETERS_MAX:
        raise TooLarge(f"{count} parameters")
    torch.manual_seed(7)
    model = maker_of(config).from_config(config, dtype=torch.float32)
    kept = model.state_dict()
    for path, weight in [*model.named_parameters(), *model.named_buffers()]:
        if path in kept and weight.dtype == torch.float32:
            weight.data = stirred(path, weight.data)
    if _repeats(model.eval()):
        model.get_input_embeddings().weight.data /= 6
    model.save_pretrained(directory)
    return directory


def _repeats(model: Any) -> bool:
    """Return whether an embedding shared with the head outweighs the layers, so that a token is mostly
    followed by itself."""
    tokens = torch.arange(3, VOCABULARY)[None]
    with torch.inference_mode(), suppress(Exception):  # those that cannot are refused later, in words
        logits = model(input_ids=tokens).logits
        return float((logits.argmax(-1) == tokens).float().mean()) > 0.2
    return False


def stirred(path: str, weight: torch.Tensor) -> torch.Tensor:
    if weight.ndim >= 2:
        return weight if weight.std() > SPREAD / 3 else torch.randn_like(weight) * SPREAD
    if weight.shape == (VOCABULARY,):
        spread = 0.02
    elif path.endswith(("bias", "sinks")) and "norm" not in path.lower():
        spread = 0.2
    else:
        spread = 0.05
    return weight + torch.randn_like(weight) * spread
