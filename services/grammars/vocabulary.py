"""Bytes that each token of a model stands for, as a grammar sees it, and how forced text is tokenized.

By the model's own tokenizer. Tokens that it lacks, of a padded vocabulary, stand for nothing and are never
allowed. An added token, special or not, stands for itself: only a grammar that names it allows it. Wherever a
grammar has its text, other tokens spell that (`text-is-not-token`).
"""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from llguidance import LLTokenizer

from baton.models.model_facts import ModelFacts
from baton.models.tokenizer_files import reference_tokenizer
from baton.runtime.errors import StartupError, in_a_line


def vocabulary_of(backend: Any, tokens: int, ends: Sequence[int]) -> LLTokenizer:
    """`backend`: a `tokenizers.Tokenizer` that neither cuts nor pads. `tokens`: of the model, of which `ends`
    end a text. Blocks, for some tenths of a second. Raises StartupError."""
    if not ends:
        raise StartupError("the model names no token that ends a text, so that no answer can be held")
    most = max(tokens, backend.get_vocab_size(with_added_tokens=True))
    try:
        recognizing = LLTokenizer(_with_special_tokens(backend.to_str()), n_vocab=most, eos_token=[*ends])
        spelling: Any = _SpellingTokenizer(recognizing)
        return LLTokenizer(spelling, eos_token=[*ends])
    except ValueError as error:
        raise StartupError(f"no grammar can be held by the model's tokenizer: {in_a_line(error)}") from error


def _with_special_tokens(tokenizer: str) -> str:
    """Return a serialized tokenizer whose added tokens are special, but for runs of white space.

    The library takes an added token that is not special for text, if its name has no angle brackets
    (`[TOOL_CALLS]`). A model has such tokens for marks, and writes white space in texts by them.
    """
    whole = json.loads(tokenizer)
    for each in whole["added_tokens"]:
        each["special"] = each["special"] or bool(each["content"].strip())
    return json.dumps(whole, ensure_ascii=False)


class _SpellingTokenizer:
    """Tokenizes text as the model's tokenizer does, but never into an added token. Its attributes are those
    that the library reads."""

    is_tokenizer_wrapper: Final = True
    bos_token_id: Final = None

    def __init__(self, recognizing: LLTokenizer) -> None:
        """`recognizing`: makes added tokens of their text."""
        self._recognizing = recognizing
        every = range(recognizing.vocab_size)
        self.tokens = [recognizing.decode_bytes([token]) for token in every]
        self.special_token_ids = [token for token in every if recognizing.is_special_token(token)]
        self.eos_token_id = recognizing.eos_token
        self._special = frozenset(self.special_token_ids)
        self._added = [text for token in self.special_token_ids if (text := recognizing.decode_str([token]))]

    def __call__(self, text: str) -> list[int]:
        tokens = self._recognizing.tokenize_str(text)
        if self._special.isdisjoint(tokens):
            return tokens
        # Cut behind the first letter of each added token's text, so that no piece has one whole. Where the
        # cuts are depends on what follows alone: what is left of a text is tokenized as within the whole.
        cuts = {0, len(text)}.union(*(_starts(text, added) for added in self._added))
        return [token for first, end in pairwise(sorted(cuts)) for token in self._spelled(text[first:end])]

    def _spelled(self, piece: str) -> list[int]:
        tokens = self._recognizing.tokenize_str(piece)
        is_plain = self._special.isdisjoint(tokens)
        return tokens if is_plain else self._recognizing.greedy_tokenize(piece)


def _starts(text: str, part: str) -> Iterator[int]:
    """The places behind the first letter of each `part` in `text`."""
    place = text.find(part)
    while place >= 0:
        yield place + 1
        place = text.find(part, place + 1)


def read_vocabulary(model_dir: Path, facts: ModelFacts) -> LLTokenizer:
    """The same of a safetensors model directory. Raises StartupError."""
    backend = reference_tokenizer(model_dir).backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return vocabulary_of(backend, facts.vocab_size, facts.eos_token_ids)
