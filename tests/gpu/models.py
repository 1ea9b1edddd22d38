"""Models of the kit: random ones, which need no file of weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast

from tests.engine import tiny_models

FIRST: Final = ("llama-gqa-untied", "mistral, window", "qwen3-moe", "gpt-oss", "gpt2-learned-positions")
"""Model structures that are tried first: one of each kind."""

EIGHT_BILLION: Final = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
"""Llama 3 8B's shape: 16 GB of bfloat16, 131,072 bytes of keys and values a token."""
SMALL: Final = LlamaConfig(
    vocab_size=20_480,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
"""Shape of the model for a CPU, where only the kit itself is tried."""
VLLM_SMALL: Final = LlamaConfig(**{**SMALL.to_dict(), "head_dim": 32, "initializer_range": 0.2})
"""The same for vLLM's engine, with the smallest heads of its attention on CPUs, and telling weights."""


def anatomies() -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield each model structure that the CPU's tests use, by name, those in FIRST first."""
    from tests.engine.matrix.table import TYPES  # imports the torch engine, which vLLM's environment lacks
    from tests.engine.test_equals_reference import PLACED
    from tests.models.eight_heads import EIGHT_HEADS

    types = {name: entry.make() for name, entry in TYPES.items()}
    every = {**tiny_models.ARCHITECTURES, "llama-eight-heads": EIGHT_HEADS, **types, **PLACED}
    yield from ((name, every[name]) for name in FIRST)
    yield from ((name, config) for name, config in every.items() if name not in FIRST)


def has_experts(config: PreTrainedConfig) -> bool:
    """Return whether the model has experts. Rounding in bfloat16 then picks other experts of nearly equal
    score, so tokens cannot be compared."""
    text = config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text, name, None) or 0) > 1 for name in names)


def served(config: PreTrainedConfig, directory: Path) -> Path:
    """A random model of `config` in `directory`, with a tokenizer."""
    return with_tokenizer(tiny_models.save(config, directory), config.vocab_size)


def unweighted(config: PreTrainedConfig, directory: Path) -> Path:
    """`config` in `directory` without weights, for `--load-format dummy`, with a tokenizer."""
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    return with_tokenizer(directory, config.vocab_size)


def with_tokenizer(directory: Path, vocabulary: int) -> Path:
    """Save a tokenizer with `vocabulary` tokens in the directory: the bytes, and words that no text has."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"w{number}" for number in range(vocabulary - len(pieces))]
    backend = Tokenizer(models.BPE(vocab={piece: id_ for id_, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)
    return directory
