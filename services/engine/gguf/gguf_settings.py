"""Rules for GGUF settings: which attribute of a transformers configuration has the value of each key.

The transformers library's reader maps some keys of each architecture and ignores the others. Here each key
has a rule: which attribute has it, which values change nothing, and whether its value is written. A key
without a rule is refused, and so is a value that the configuration does not have. Positions and windows are
checked in `conversion_checks.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

from gguf import Keys

SCALE_BY_WIDTH: Final[Mapping[str, frozenset[int]]] = {"gemma2": frozenset({46}), "gemma3": frozenset({62})}
"""Numbers of layers that identify models whose attention is scaled by hidden size / heads, by architecture.

These are the 27B models, as llama.cpp knows them. No file states the scale. All other models are scaled by
the head size.
"""
PRE_SCALE: Final = "query_pre_attn_scalar"
ALIBI_BIAS: Final = 8.0
GATINGS: Final[Mapping[str, int]] = {"qwen2_moe": 1, "qwen3_moe": 1, "minimax_m2": 2, "gpt_oss": 3}
"""Number by which a GGUF file states the gating function of its experts, by transformers' model type."""
SHOWN_CHARACTERS: Final = 40
PREFIX: Final = "{arch}."


def _constants(namespace: type) -> Iterator[str]:
    for value in vars(namespace).values():
        if isinstance(value, type):
            yield from _constants(value)
        elif isinstance(value, str):
            yield value


KNOWN_KEYS: Final = frozenset(
    each.removeprefix(PREFIX) for each in _constants(Keys) if each.startswith(PREFIX)
)
"""All keys of architecture settings that the gguf package knows, without the architecture's prefix."""


class Settings(Protocol):
    """Attributes of a GGUF file's header that the rules for settings read."""

    architecture: str

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the model's architecture in the file: values by key without the
        architecture's prefix."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule for one GGUF setting: which attribute of a transformers configuration has its value."""

    names: tuple[str, ...] = ()
    """Attributes of a transformers configuration that may have the setting's value.

    The first one that the configuration's class declares counts.
    """
    plain: tuple[Any, ...] = ()
    """Values of the setting that have no effect on results. Accepted even if the configuration has no
    attribute for the setting."""
    read: Callable[[Any], Any] | None = None
    """Function (transformers configuration) that returns the value that the model has for the setting. Used
    instead of `names`."""
    written: bool = False
    """Whether the GGUF file's value is written into the first attribute of `names` that the configuration
    declares."""

    def agrees(self, value: Any, config: Any) -> bool:
        """Return whether the GGUF file's `value` of this setting is the one with which the model of `config`
        is computed."""
        if self.read is not None:
            return any(_equal(value, each) for each in (self.read(config), *self.plain))
        name = self.attribute(config)
        has = None if name is None else getattr(config, name)
        return any(_equal(value, each) for each in (self.plain if has is None else (has,)))

    def attribute(self, config: Any) -> str | None:
        """Return the name of the attribute of `config` that has the setting's value, or None."""
        kind: type = type(config)
        declared = _declared(kind)
        return next((each for each in self.names if each in declared), None)


def write_settings(header: Settings, config: Any) -> None:
    """Write settings that transformers' GGUF reader ignored into its `config`, if it has attributes for
    them."""
    for key, value in header.settings.items():
        rule = _rule(header.architecture, key)
        name = None if rule is None or not rule.written else rule.attribute(config)
        if name is not None and rule is not None and not rule.agrees(value, config):
            setattr(config, name, None if value == 0 and 0 in rule.plain else value)
    context = header.settings.get("context_length")
    if isinstance(context, int) and getattr(config, "max_position_embeddings", None) != context:
        config.max_position_embeddings = context
    if header.architecture in SCALE_BY_WIDTH:
        setattr(config, PRE_SCALE, _pre_scale(header, config))


def unread_settings(header: Settings, config: Any) -> list[str]:
    """Return descriptions of the GGUF file's settings that the transformers `config` lacks: keys and
    values."""
    return [
        shown(header, key)
        for key, value in header.settings.items()
        if (rule := _rule(header.architecture, key)) is None or not rule.agrees(value, config)
    ]


def shown(header: Settings, key: str) -> str:
    """Return a key of the GGUF file with its value, as error messages show them."""
    value = header.settings.get(key)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    short = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
    return f"{header.architecture}.{key} ({short})"


def head_size(config: Any) -> int:
    """Return the width of an attention head's queries."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rule(architecture: str, key: str) -> Rule | None:
    known = BY_ARCHITECTURE.get((architecture, key)) or RULES.get(key)
    return known or (OFF if key in KNOWN_KEYS else None)


@cache
def _declared(kind: type) -> frozenset[str]:
    """Return the attributes that a configuration class declares. Other attributes of its objects have no
    effect."""
    fields = getattr(kind, "__dataclass_fields__", {})
    return frozenset(fields) | frozenset(getattr(kind, "attribute_map", {}))


def _equal(value: Any, other: Any) -> bool:
    """Return whether two setting values are equal. A list with the same value for each layer equals that
    value."""
    if other is ANY:
        return True
    if isinstance(value, list) and value and not isinstance(other, list):
        return all(_equal(each, other) for each in value)
    if isinstance(value, int | float) and isinstance(other, int | float):
        return math.isclose(value, other, rel_tol=1e-5)
    return bool(value == other)


def _pre_scale(header: Settings, config: Any) -> int:
    """Return the number n for which the attention scale of a Gemma model is 1 / sqrt(n)."""
    scale = header.settings.get("attention.scale")
    if isinstance(scale, float) and scale > 0:
        return max(1, round(scale**-2))  # a value that differs from the file's is refused
    if config.num_hidden_layers in SCALE_BY_WIDTH[header.architecture]:
        return int(config.hidden_size // config.num_attention_heads)
    return head_size(config)


def _kv_heads(config: Any) -> int:
    if config.model_type == "falcon":
        grouped = config.new_decoder_architecture or not config.multi_query
        return int(config.num_kv_heads if grouped else 1)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _feed_forward(config: Any) -> int:
    names = () if config.model_type == "bloom" else ("ffn_hidden_size", "n_inner", "intermediate_size")
    sizes = (getattr(config, name, None) for name in names)
    return int(next((each for each in sizes if each), 4 * config.hidden_size))


def _expert_width(config: Any) -> int:
    dense = config.intermediate_size if getattr(config, "num_local_experts", 0) else 0
    return int(getattr(config, "moe_intermediate_size", None) or dense)


def _attention_scale(config: Any) -> float:
    multiplier = getattr(config, "attention_multiplier", None)
    if multiplier:
        return float(multiplier)
    size = float(getattr(config, PRE_SCALE, None) or head_size(config))
    return 1 / math.sqrt(size)


def _normalises_experts(config: Any) -> bool:
    declared = getattr(config, "norm_topk_prob", None)
    return bool(getattr(config, "num_local_experts", 0)) if declared is None else bool(declared)


def _alibi_bias(config: Any) -> float:
    return ALIBI_BIAS if config.model_type == "bloom" or getattr(config, "alibi", False) else 0.0


ANY: Final = object()
NONE: Final = (0,)
ONE: Final = (0, 1)
OFF: Final = Rule(plain=NONE)
"""Rule of a key for a feature that no supported architecture has: its value must be 0."""
HARMLESS: Final = Rule(read=lambda _: ANY)
"""Rule of a key that changes no result, or that is checked elsewhere: any value is accepted."""
EPSILONS: Final = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")

POSITIONS: Final = (
    *("attention.sliding_window", "attention.sliding_window_pattern", "rope.dimension_count"),
    *("rope.dimension_count_swa", "rope.freq_base", "rope.freq_base_swa", "rope.global.freq_base"),
    *("rope.local.freq_base", "rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.factor"),
    *("rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.type"),
    *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
"""Keys of settings for positions and windows, which `conversion_checks.py` checks."""

RULES: Final[Mapping[str, Rule]] = {
    "vocab_size": HARMLESS,  # checked by the embedding's shape
    "context_length": HARMLESS,  # written into the configuration
    "block_count": Rule(("num_hidden_layers",)),
    "embedding_length": Rule(("hidden_size",)),
    "feed_forward_length": Rule(("ffn_hidden_size", "n_inner"), read=_feed_forward, written=True),
    "use_parallel_residual": Rule(("use_parallel_residual",), (False,)),
    "tensor_data_layout": Rule(plain=("Meta AI original pth", "jploski")),
    "logit_scale": Rule(("logit_scale",), ONE),
    "residual_scale": Rule(("residual_multiplier",), ONE),
    "embedding_scale": Rule(("embedding_multiplier",), ONE),
    "attn_logit_softcapping": Rule(("attn_logit_softcapping",), NONE),
    "final_logit_softcapping": Rule(("final_logit_softcapping",), NONE, written=True),
    "expert_count": Rule(("num_experts", "num_local_experts"), NONE),
    "expert_used_count": Rule(("num_experts_per_tok",), NONE),
    "expert_feed_forward_length": Rule(("moe_intermediate_size",), NONE, _expert_width, written=True),
    "expert_shared_feed_forward_length": Rule(("shared_expert_intermediate_size",), NONE, written=True),
    "expert_shared_count": Rule(("n_shared_experts",), NONE),
    "expert_group_count": Rule(("n_group",), ONE),
    "expert_group_used_count": Rule(("topk_group",), ONE),
    "expert_weights_scale": Rule(("routed_scaling_factor",), ONE),
    "expert_weights_norm": Rule(read=_normalises_experts),
    "expert_gating_func": Rule(read=lambda config: GATINGS.get(config.model_type, 0), plain=NONE),
    "leading_dense_block_count": Rule(("first_k_dense_replace",), NONE),
    "moe_every_n_layers": Rule(("decoder_sparse_step",), NONE),
    "swiglu_clamp_exp": Rule(("swiglu_limit",), NONE),
    "attention.head_count": Rule(("num_attention_heads",)),
    "attention.head_count_kv": Rule(read=_kv_heads),
    "attention.key_length": Rule(("head_dim",), read=head_size, written=True),
    "attention.value_length": Rule(read=head_size),
    "attention.key_length_swa": Rule(read=head_size),
    "attention.value_length_swa": Rule(read=head_size),
    "attention.layer_norm_rms_epsilon": Rule(("rms_norm_eps", "norm_eps"), written=True),
    "attention.layer_norm_epsilon": Rule(EPSILONS, written=True),
    "attention.causal": Rule(plain=(True,)),
    "attention.max_alibi_bias": Rule(read=_alibi_bias),
    "attention.clamp_kqv": Rule(("clip_qkv",), NONE),
    "attention.scale": Rule(read=_attention_scale, plain=NONE),
    "attention.output_scale": Rule(plain=ONE),
    "attention.shared_kv_layers": Rule(("num_kv_shared_layers",), NONE),
    **dict.fromkeys(POSITIONS, HARMLESS),
}
"""Rules by GGUF key, without the architecture's prefix. Other keys that the gguf package knows must be 0."""

BY_ARCHITECTURE: Final[Mapping[tuple[str, str], Rule]] = {
    ("stablelm", "use_parallel_residual"): HARMLESS,  # llama.cpp and the library decide it by the tensors
    ("gemma2", "attn_logit_softcapping"): Rule(("attn_logit_softcapping",), NONE, written=True),
}
"""Rules for keys of single architectures, by (architecture, key). They replace the general rules."""
