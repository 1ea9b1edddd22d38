"""Which bytes does each token of a model stand for, as a grammar sees it?

By the model's own tokenizer. Tokens that it lacks, of a padded vocabulary, stand for nothing and are never
allowed; so are special tokens, but where a grammar names them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from services.runtime.errors import StartupError, in_a_line
from services.runtime.model_facts import ModelFacts
from services.runtime.tokenizer_files import reference_tokenizer


def vocabulary_of(backend: Any, tokens: int, ends: Sequence[int]) -> LLTokenizer:
    """`backend`: a `tokenizers.Tokenizer` that neither cuts nor pads. `tokens`: of the model, of which `ends`
    end a text. Blocks, for a tenth of a second or more. Raises StartupError."""
    if not ends:
        raise StartupError("the model names no token that ends a text, so that no answer can be held")
    most = max(tokens, backend.get_vocab_size(with_added_tokens=True))
    try:
        return LLTokenizer(backend.to_str(), n_vocab=most, eos_token=[*ends])
    except ValueError as error:
        raise StartupError(f"no grammar can be held by the model's tokenizer: {in_a_line(error)}") from error


def read_vocabulary(model_dir: Path, facts: ModelFacts) -> LLTokenizer:
    """The same of a safetensors model directory. Raises StartupError."""
    backend = reference_tokenizer(model_dir).backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return vocabulary_of(backend, facts.vocab_size, facts.eos_token_ids)
