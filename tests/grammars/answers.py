"""Grammars over small vocabularies, and outputs drawn at random from what they allow."""

import json
import random
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer

from baton.grammars.grammar_compiler import LIMITS, SOURCES, compile_grammar
from baton.grammars.grammar_state import GrammarState
from baton.grammars.vocabulary import vocabulary_of
from baton.rooms.request import Grammar, GrammarKind, Request
from tests.api import tiny

PADDING: Final = 13
"""Tokens of the model that its tokenizer lacks."""
KINDS: Final = {"byte level": tiny.byte_level, "byte fallback": tiny.byte_fallback}
END: Final = tiny.END_ID


@cache
def vocabulary(kind: str = "byte level") -> LLTokenizer:
    backend = KINDS[kind]().backend_tokenizer
    return vocabulary_of(backend, backend.get_vocab_size() + PADDING, (END,))


class Slow:
    """Reader of the vocabulary that waits until it is released."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self) -> LLTokenizer:
        assert self.go.wait(20)
        return vocabulary()


def schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


NAMED: Final = schema(
    {
        "type": "object",
        "properties": {"the fox": {"enum": [1, 2, 3]}, "kind": {"enum": ["lazy dog", "quick dog"]}},
        "required": ["the fox", "kind"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
"""Schema of which most of an answer is forced."""


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


def request(**more: Any) -> Request:
    return Request("held", (1,), 10_000, **{"eos_token_ids": (END,), **more})


def fold_of(grammar: Grammar, kind: str = "byte level") -> GrammarState:
    return compile_grammar(grammar, vocabulary(kind))


def matcher_of(grammar: Grammar) -> LLMatcher:
    """Return the library's matcher of a grammar, for doubles of it."""
    return LLMatcher(vocabulary(), SOURCES[grammar.kind](grammar.text), log_level=0, limits=LIMITS)


def tokens_in(mask: bytes) -> list[int]:
    return [token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1]


def drawn(fold: GrammarState, asked: Request, seed: int, most: int = 400) -> list[int]:
    """Return an output of allowed tokens, up to an end or to `most` tokens.

    Ends are preferred, so that most outputs have one.
    """
    draw, output = random.Random(seed), list[int]()
    while len(output) < most and asked.finish_reason(output) is None:
        allowed = tokens_in(fold.allowed(asked, output))
        ends = [token for token in allowed if token in asked.ending_token_ids]
        output.append(draw.choice(ends if ends and draw.random() < 0.5 else allowed))
    return output


def text_of(output: Sequence[int], kind: str = "byte level") -> str:
    """Return the text of an output without special tokens."""
    decoded: str = KINDS[kind]().backend_tokenizer.decode([*output], skip_special_tokens=True)
    return decoded


def ids(text: str, kind: str = "byte level") -> list[int]:
    found: list[int] = KINDS[kind]().backend_tokenizer.encode(text, add_special_tokens=False).ids
    return found
