"""Writer of GGUF files of tiny models, for tests."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from safetensors.torch import load_file

from tests.engine import tiny_models

HEADS, KV_HEADS = 6, 2
TOKENS: Final = [chr(0x100 + place) for place in range(tiny_models.VOCABULARY)]
NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}
LAYER_NORM: Final = frozenset({"bloom", "falcon", "gpt2", "nemotron", "stablelm", "starcoder2"})
"""Architectures whose norms are no RMS norms."""
Tensors = dict[str, torch.Tensor]
Write = Callable[[GGUFWriter], None]


def in_gguf(weights: Tensors, heads: int = HEADS, kv_heads: int = KV_HEADS) -> Tensors:
    """Return weights by GGUF's names, with rows permuted as in GGUF files."""
    renamed = {}
    for name, weight in weights.items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        for part, count in (("attn_q", heads), ("attn_k", kv_heads)):
            if part in name:
                weight = weight.view(count, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
        renamed[name] = weight
    return renamed


def nothing(_: GGUFWriter) -> None:
    """Return the settings that every file has."""


def write(
    file: Path,
    tensors: Tensors,
    more: Write = nothing,
    kind: str = "llama",
    theta: float = 10_000.0,
    turned: int = 16,
    tokenizer: str = "gpt2",
    split: str | None = "gpt-2",
    tokens: Sequence[str] = TOKENS,
    stored: GGMLQuantizationType | None = None,
    shape: Mapping[str, int] = tiny_models.SHAPE,
    types: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write a GGUF file.

    `stored`: type of matrices with rows of whole blocks of 32 numbers. `types`: types of tensors that are
    given as bytes.
    """
    writer = GGUFWriter(file, kind)
    writer.add_context_length(tiny_models.CONTEXT)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    (writer.add_layer_norm_eps if kind in LAYER_NORM else writer.add_layer_norm_rms_eps)(1e-6)
    writer.add_rope_dimension_count(turned)
    writer.add_rope_freq_base(theta)
    writer.add_vocab_size(tiny_models.VOCABULARY)
    writer.add_tokenizer_model(tokenizer)
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list(list(tokens))
    writer.add_token_scores([0.0] * tiny_models.VOCABULARY)
    writer.add_token_types([1] * tiny_models.VOCABULARY)
    writer.add_token_merges([])
    more(writer)
    for name, tensor in tensors.items():
        numbers = tensor.contiguous().numpy()
        if stored is None or numbers.ndim < 2 or numbers.shape[-1] % 32:
            writer.add_tensor(name, numbers, raw_dtype=(types or {}).get(name))
        else:
            writer.add_tensor(name, quantize(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def tensors_of(directory: Path, kind: str, layers: int) -> Tensors:
    """Return the weights of the tiny model in `directory` by GGUF's names for the architecture `kind`."""
    architecture = next(each for each, name in MODEL_ARCH_NAMES.items() if name == kind)
    names = get_tensor_name_map(architecture, layers)
    shift = 1.0 if kind.startswith("gemma") else 0.0
    return {
        str(names.get_name(name, (".weight", ".bias"))): weight + shift * name.endswith("norm.weight")
        for name, weight in load_file(directory / "model.safetensors").items()
    }
