"""A tiny model for tests with real processes that need other head counts than the demo model has.

Its weights are random and its tokenizer is the demo model's. It is quick to load and to compute, and its
heads divide evenly among ranks."""

import json
import shutil
from pathlib import Path
from typing import Final

from transformers import LlamaConfig

from tests.engine.tiny_models import save

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


def with_tokenizer(directory: Path, demo: Path) -> Path:
    """Give the model in `directory` the tokenizer of `demo`, as far as that has one."""
    for name in TOKENIZER:
        if (demo / name).is_file():
            shutil.copyfile(demo / name, directory / name)
    return directory
