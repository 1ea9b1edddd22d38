"""Features that a model needs and the torch engine lacks, as its configuration file shows them.

Only the file's keys and values are read, without the transformers library, so that a model is refused before
anything is started. `baton.engine.loading.capability_probes` reads the library's configuration, which adds
what a file leaves out.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from baton.models.library_types import LIBRARY, drawing_types, known_types, library_version

Json = dict[str, Any]

ALIASES: Final[Mapping[str, str]] = {"kimi_k2": "deepseek_v3"}
"""Canonical model type, by another name under which the same implementation and configuration are
published."""
RECURRENT: Final = ("state_size", "ssm_cfg", "attention_hidden_size", "chunkwise_kernel", "lru_width")
"""Configuration keys that only state-space and recurrent models have (Mamba, RWKV, xLSTM, Griffin).

The layers of such models keep a state in place of keys and values.
"""
STATES: Final = "state-space or recurrent layers (Mamba, RWKV)"
DIFFERING: Final = "layers that differ from each other"
ENCODER: Final = "an encoder"
LATER: Final = "attention to later tokens"
BLOCKS: Final = "attention to blocks of a sequence"
SHARED: Final = "keys and values shared between layers"
DRAWS: Final = "a definition that draws text, which the transformers library does not have"
ONE_TEXT: Final = "one language model, where its configuration has several"
SEEING: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Layer types of a configuration whose attention is supported: full, sliding-window or chunked."""
OTHER_LAYERS: Final[Mapping[str, str]] = {
    "linear_attention": "linear-attention or state-space (Mamba) layers",
    "hybrid": "layers of attention and of state space (Mamba)",
    "conv": "convolution layers",
}
NO_MIXER: Final = frozenset({"mlp", "moe"})
"""Layer types of a configuration that read no other tokens."""
OWN_CACHES: Final = frozenset({"minimax", "recurrent_gemma", "rwkv", "xlstm"})
"""Model types that store states in a cache of their own making."""
OWN_CACHE: Final = "states in a cache of its own, where the transformers library has a common one"
ORDER: Final = (STATES, DIFFERING, ENCODER, LATER, BLOCKS, SHARED, DRAWS)
STATE_LAYERS: Final = dict.fromkeys(("mamba", "mamba2", "recurrent"), "linear_attention")
"""Layer types in a configuration that count as another type, each with the type that it counts as."""
LINEAR: Final = OTHER_LAYERS["linear_attention"]
HYBRID_WINDOW: Final = "hybrid_sliding"
HYBRID: Final = OTHER_LAYERS["hybrid"]
CONVOLUTIONS: Final = OTHER_LAYERS["conv"]


def _fewer(listed: object, count: object) -> bool:
    return isinstance(listed, list) and isinstance(count, int) and len(listed) < count


ASKED_BY: Final[Mapping[str, Callable[[Json], bool]]] = {
    STATES: lambda words: any(key in words for key in RECURRENT),
    DIFFERING: lambda words: bool(words.get("per_layer_config")),
    ENCODER: lambda words: bool(words.get("is_encoder_decoder")),
    LATER: lambda words: bool(words.get("use_bidirectional_attention")) or words.get("is_causal") is False,
    BLOCKS: lambda words: words.get("attention_type") == "block_sparse",
    SHARED: lambda words: bool(words.get("num_kv_shared_layers")),
    CONVOLUTIONS: lambda words: _fewer(words.get("full_attn_idxs"), words.get("num_hidden_layers")),
}
"""Test for each missing feature, by the feature's description: whether a configuration, or its text part,
needs the feature."""

LAYERS: Final = ("layer_types", "layers_block_type")
BY_TYPE: Final[tuple[tuple[str, tuple[str, ...], str], ...]] = (
    (STATES, RECURRENT, "falcon_mamba mamba mamba2 recurrent_gemma rwkv xlstm zamba zamba2"),
    (
        DIFFERING,
        ("per_layer_config",),
        (
            "dots3_note dots3_note_text gemma4 gemma4_text diffusion_gemma step3p7 gemma4_unified"
            " gemma4_unified_text gemma4_unified_assistant"
        ),
    ),
    (
        ENCODER,
        ("is_encoder_decoder",),
        "florence2 pix2struct pp_formulanet t5 t5gemma2 umt5 vision-encoder-decoder",
    ),
    (LATER, ("use_bidirectional_attention", "is_causal"), "paligemma"),
    (BLOCKS, ("attention_type",), "big_bird bigbird_pegasus"),
    (SHARED, ("num_kv_shared_layers",), "gemma3n gemma3n_text"),
    (ONE_TEXT, (), "musicgen musicgen_melody"),
    (CONVOLUTIONS, LAYERS, "lfm3 lfm3_vl"),
    (
        HYBRID,
        LAYERS,
        (
            "falcon_h1 inkling2 inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model"
            " inkling_text zaya"
        ),
    ),
    (
        f"layers of type {HYBRID_WINDOW}",
        LAYERS,
        ("inkling2 inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model inkling_text"),
    ),
    ("layers of type compressed_sparse_attention", LAYERS, "deepseek_v4"),
    (
        "layers of type indexed_attention",
        LAYERS,
        ("axk2 deepseek_v32 glm5_next glm_moe_dsa hy_v4 hy_v4_vl mistral_large4 qwen4_exp qwen4_exp_text"),
    ),
    ("layers of type reference_sliding_attention", LAYERS, "unlimited_ocr"),
    (
        LINEAR,
        LAYERS,
        (
            "bailing_hybrid bamba glm5_next granitemoehybrid jamba kimi_linear lara_mini minimax olmo_hybrid"
            " qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next minicpm_ocr minicpmv4_6"
            " minicpmv4_7 nemotron_h nemotron_h_omni qwen4_exp qwen4_exp_text"
        ),
    ),
)
"""Missing features, each with the configuration keys that decide it and the model types that have it by
default.

A configuration that has one of the keys is judged by the key's value, any other by its model type. Model
types are separated by spaces.
"""

DRAWS_TEXT: Final = re.compile(r"ForCausalLM|LMHead|ForConditionalGeneration|ForImageTextToText|Generation$")
OTHER_HEAD: Final = re.compile(
    r"For\w*Classification$|ForQuestionAnswering$|ForMultipleChoice$|ForMaskedLM$|ForNextSentencePrediction$"
    r"|Reward|ForEmbedding|ForTextEncoding|ForScoring|ForRanking|Reranker|CrossEncoder"
)
"""Pattern of class names of models whose head scores or embeds a text instead of generating tokens."""


def text_words(config: Json) -> Json:
    """Return the part of a model's configuration about its language model, or all of it if it has no
    parts."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def canonical(config: Json) -> Json:
    """Return the configuration with the model type that the transformers library knows in place of an
    alias."""
    kind = config.get("model_type")
    return {**config, "model_type": ALIASES[kind]} if isinstance(kind, str) and kind in ALIASES else config


def needs_of(config: Json) -> list[str]:
    """Return descriptions of the features that a configuration's model needs and the torch engine lacks."""
    parts = (canonical(config), canonical(text_words(config)))
    types = {str(each.get("model_type")) for each in parts}
    found = [need for need, asks in ASKED_BY.items() if any(asks(words) for words in parts)]
    found += [
        need
        for need, words, listed in BY_TYPE
        if not types.isdisjoint(listed.split())
        and not any(part.get(word) not in (None, {}) for part in parts for word in words)
    ]
    if not any(part.get("is_encoder_decoder") for part in parts):
        found += _layers(parts[1])
    return in_order([*found, *other_heads(config), *_unknown(parts[0])])


def in_order(needs: Sequence[str]) -> list[str]:
    """Return the descriptions of missing features without duplicates: first those in `ORDER`, in that order,
    then the others."""
    place = {need: index for index, need in enumerate(ORDER)}
    return sorted(dict.fromkeys(needs), key=lambda need: place.get(need, len(ORDER)))


def _layers(words: Json) -> Iterator[str]:
    lists = [listed for name in LAYERS if isinstance(listed := words.get(name), list)]
    kinds = {STATE_LAYERS.get(str(each), str(each)) for listed in lists for each in listed}
    for kind in sorted(kinds - SEEING):
        # Other words, such as "attention", may be parts of a layer.
        if kind in OTHER_LAYERS or kind == HYBRID_WINDOW or kind.endswith("_attention"):
            yield OTHER_LAYERS.get(kind, f"layers of type {kind}")


def own_caches(config: Json) -> list[str]:
    """Return that the model stores states in a cache of its own, if it does."""
    types = {part.get("model_type") for part in (config, text_words(config))}
    return [] if types.isdisjoint(OWN_CACHES) else [OWN_CACHE]


def other_heads(config: Json) -> list[str]:
    """Return that the model lacks a head that draws text, if its files have another head, in words."""
    listed = config.get("architectures")
    names = [str(each) for each in listed] if isinstance(listed, list) else []
    if any(DRAWS_TEXT.search(name) for name in names):
        return []
    others = (name for name in names if OTHER_HEAD.search(name))
    return [f"a head that draws text, where its files have that of {name}" for name in others]


def _unknown(config: Json) -> Iterator[str]:
    kind = config.get("model_type")
    if not isinstance(kind, str) or not known_types():
        return
    if kind not in known_types():
        code = " (its own Python files are not run)" if config.get("auto_map") else ""
        yield f"a definition of its type, which {LIBRARY} {library_version()} does not have{code}"
    elif drawing_types() and kind not in drawing_types():
        yield DRAWS
