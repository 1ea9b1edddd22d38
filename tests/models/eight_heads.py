"""Tiny models for tests with real processes that need other attention than the demo model has.

Their weights are random and their tokenizer is the demo model's. They are quick to load and to compute, and
their heads divide evenly among ranks."""

import json
import shutil
from pathlib import Path
from typing import Final

from transformers import (
    DeepseekV3Config,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Mamba2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from tests.engine.tiny_models import LATENT_SHAPE, save

VOCABULARY: Final = 1024
"""Number of the tokenizer's first tokens that the model has."""
CONTEXT: Final = 2048

EIGHT_HEADS: Final = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=CONTEXT,
    initializer_range=0.2,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)

LATENTS: Final = DeepseekV3Config(
    **LATENT_SHAPE
    | {"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 4, "first_k_dense_replace": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": CONTEXT},
    tie_word_embeddings=False,
)

_STATES: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
_HYBRID: Final = {
    **_STATES,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_LINEAR: Final = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS: Final = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
STATES: Final = {
    "qwen3_5": Qwen3_5TextConfig(**_HYBRID, **_LINEAR, intermediate_size=96),
    "qwen3_next": Qwen3NextConfig(**_HYBRID, **_LINEAR, **_EXPERTS),
    "mamba2": Mamba2Config(**_STATES, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**_HYBRID, **_LINEAR, **_EXPERTS),
    "granite": GraniteMoeHybridConfig(
        **_HYBRID,
        intermediate_size=32,
        shared_intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        mamba_n_heads=8,
        mamba_d_state=16,
        mamba_n_groups=1,
        layer_types=["mamba", "mamba", "attention", "mamba"],
    ),
}
"""Configurations of models with states, by type."""

TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def eight_heads(directory: Path, demo: Path) -> Path:
    """A Llama of 4 layers, 8 heads and 2 KV heads in `directory`, always the same: 1, 2 and 4 ranks can hold
    it, the last with copies of KV heads. `demo`: whose tokenizer it gets."""
    return with_tokenizer(save(EIGHT_HEADS, directory), demo)


def chatting_heads(directory: Path, demo: Path) -> Path:
    """The same with the tokens of its vocabulary alone in its tokenizer, so that any text has only such
    tokens, and its chat template can be rendered."""
    model = eight_heads(directory, demo)
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    bpe = tokenizer["model"]
    bpe["vocab"] = {token: id_ for token, id_ in bpe["vocab"].items() if id_ < VOCABULARY}
    pairs = (each.split(" ") if isinstance(each, str) else each for each in bpe["merges"])
    bpe["merges"] = [each for each in pairs if "".join(each) in bpe["vocab"]]
    path.write_text(json.dumps(tokenizer))
    return model


def latents(directory: Path, demo: Path) -> Path:
    """A DeepSeek V3 of 4 layers and 4 heads in `directory`, always the same: 1, 2 and 4 ranks can hold it,
    each with whole latents. `demo`: whose tokenizer it gets."""
    return with_tokenizer(save(LATENTS, directory), demo)


def states(directory: Path, demo: Path, kind: str) -> Path:
    """A model of a type whose layers have states in `directory`, always the same. `demo`: whose tokenizer it
    gets."""
    return with_tokenizer(save(STATES[kind], directory), demo)


def with_tokenizer(directory: Path, demo: Path) -> Path:
    """Give the model in `directory` the tokenizer of `demo`, as far as that has one."""
    for name in TOKENIZER:
        if (demo / name).is_file():
            shutil.copyfile(demo / name, directory / name)
    return directory
