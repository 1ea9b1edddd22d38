"""A model's vocabulary for grammars: the bytes of each token, and how forced text is tokenized.

The model's own tokenizer is used. Ids of a padded vocabulary that the tokenizer lacks have no bytes and are
never allowed. An added token, special or not, is allowed only by a grammar that names it. If a grammar
contains the text of an added token, other tokens spell that text (`text-is-not-token`).
"""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from llguidance import LLTokenizer

from baton.models.model_facts import ModelFacts
from baton.models.tokenizer_files import reference_tokenizer
from baton.runtime.errors import StartupError, describe_error


def vocabulary_of(backend: Any, tokens: int, ends: Sequence[int]) -> LLTokenizer:
    """Return a model's vocabulary for llguidance. Blocks for some tenths of a second. Raises StartupError.

    `backend`: a `tokenizers.Tokenizer` that neither truncates nor pads. `tokens`: size of the model's
    vocabulary.
    `ends`: ids of the tokens that end a text.
    """
    if not ends:
        raise StartupError("the model names no token that ends a text, so that no answer can be held")
    most = max(tokens, backend.get_vocab_size(with_added_tokens=True))
    try:
        recognizing = LLTokenizer(_with_special_tokens(backend.to_str()), n_vocab=most, eos_token=[*ends])
        spelling: Any = _SpellingTokenizer(recognizing)
        return LLTokenizer(spelling, eos_token=[*ends])
    except ValueError as error:
        raise StartupError(
            f"no grammar can be held by the model's tokenizer: {describe_error(error)}"
        ) from error


def _with_special_tokens(tokenizer: str) -> str:
    """Return a serialized tokenizer whose added tokens are all marked special, except runs of white space.

    llguidance treats an added token that is not special, and has no angle brackets (`[TOOL_CALLS]`), as text.
    Models use such tokens as marks, and use added tokens of white space in texts.
    """
    whole = json.loads(tokenizer)
    for each in whole["added_tokens"]:
        each["special"] = each["special"] or bool(each["content"].strip())
    return json.dumps(whole, ensure_ascii=False)


class _SpellingTokenizer:
    """Tokenizer that works as the model's does, but never outputs an added token.

    Its attributes are those that llguidance reads.
    """

    is_tokenizer_wrapper: Final = True
    bos_token_id: Final = None

    def __init__(self, recognizing: LLTokenizer) -> None:
        """Prepare the attributes that llguidance reads.

        `recognizing`: tokenizer that, unlike this one, turns the text of an added token into that token.
        """
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
        # Cut behind the first letter of each added token's text, so that no piece holds all of one. The cuts
        # depend only on the text behind them: the rest of a text is tokenized as within all of it.
        cuts = {0, len(text)}.union(*(_starts(text, added) for added in self._added))
        return [token for first, end in pairwise(sorted(cuts)) for token in self._spelled(text[first:end])]

    def _spelled(self, piece: str) -> list[int]:
        tokens = self._recognizing.tokenize_str(piece)
        is_plain = self._special.isdisjoint(tokens)
        return tokens if is_plain else self._recognizing.greedy_tokenize(piece)


def _starts(text: str, part: str) -> Iterator[int]:
    """Yield the index behind the first character of each occurrence of `part` in `text`."""
    index = text.find(part)
    while index >= 0:
        yield index + 1
        index = text.find(part, index + 1)


def read_vocabulary(model_dir: Path, facts: ModelFacts) -> LLTokenizer:
    """Return the vocabulary of the model in a directory, for llguidance. Raises StartupError."""
    backend = reference_tokenizer(model_dir).backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return vocabulary_of(backend, facts.vocab_size, facts.eos_token_ids)
