"""Text of a grammar is spelled by ordinary tokens, also if it is the text of an added one."""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.grammars.grammar_check import check_grammar
from baton.grammars.grammar_compiler import compile_grammar
from baton.grammars.grammar_state import GrammarState
from baton.grammars.vocabulary import vocabulary_of
from baton.rooms.request import FinishReason, Grammar
from tests.api import tiny
from tests.grammars.answers import drawn, lark, regex, request, schema, tokens_in

END: Final = "<|end|>"
CALL: Final = "<tool_call>"
"""An added token that is not special."""
BRACKETED: Final = "[to_call]"
"""An added token that the library would take for text by its name."""
OVERLAPPING: Final = "<<|end|>"
TEXTS: Final = (
    f"a{END}b",
    END,
    f"the fox {CALL}{END} jumps <{END}",
    f"{OVERLAPPING}{END}<|end|<|end|>>",
    f"a {END} b <pad>",
    f"a {BRACKETED} b",
)
FORMS: Final[dict[str, Callable[[str], Grammar]]] = {
    "const": lambda text: schema({"const": text}),
    "enum": lambda text: schema({"enum": [text]}),
    "a property's name": lambda text: schema(
        {
            "type": "object",
            "properties": {text: {"const": 1}},
            "required": [text],
            "additionalProperties": False,
        }
        | {"x-guidance": {"whitespace_flexible": False}}
    ),
    "pattern": lambda text: schema({"type": "string", "pattern": f"^{_escaped(text)}$"}),
    "choice": lambda text: lark(f"start: {json.dumps(text)}"),
    "regex": lambda text: regex(_escaped(text)),
}


def _escaped(text: str) -> str:
    return re.sub(r"[|\[\]]", r"\\\g<0>", text)


def unigram() -> Any:
    """A tokenizer whose vocabulary has its special tokens, as likely as any other piece."""
    letters = [*'<|end>to_calprhfx jumsp1{}:[]"', "▁", "▁the", "▁fox"]
    pieces = [*tiny.SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(letters)]
    scored = [(piece, 0.0 if place < 4 else -float(8 - len(piece))) for place, piece in enumerate(pieces)]
    made = Tokenizer(models.Unigram(scored, unk_id=3, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(each, special=True) for each in (*tiny.SPECIAL, "<unk>")])
    return made


KINDS: Final[dict[str, Callable[[], Any]]] = {
    "byte level": lambda: Tokenizer.from_str(tiny.byte_level().backend_tokenizer.to_str()),
    "byte fallback": lambda: Tokenizer.from_str(tiny.byte_fallback().backend_tokenizer.to_str()),
    "unigram": unigram,
}


@cache
def tokenizer_of(kind: str) -> tuple[Any, LLTokenizer, frozenset[int]]:
    """The tokenizer, the vocabulary of its grammars, and its added tokens."""
    backend = KINDS[kind]()
    backend.add_tokens([AddedToken(each, special=False) for each in (CALL, BRACKETED, OVERLAPPING)])
    added = frozenset(backend.get_added_tokens_decoder())
    return backend, vocabulary_of(backend, backend.get_vocab_size(), (tiny.END_ID,)), added


def bytes_of(vocabulary: LLTokenizer, output: list[int]) -> bytes:
    return b"".join(vocabulary.decode_bytes([token]) for token in output)


def expected(form: str, text: str) -> str:
    written = json.dumps(text)
    return {"a property's name": f"{{{written}:1}}", "choice": text, "regex": text}.get(form, written)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", TEXTS)
def test_an_added_tokens_text_is_spelled(kind: str, form: str, text: str) -> None:
    _, vocabulary, added = tokenizer_of(kind)
    fold = compile_grammar(FORMS[form](text), vocabulary)
    for seed in range(3):
        asked = request()
        output = drawn(fold.anew(), asked, seed)
        assert asked.finish_reason(output) is FinishReason.STOP
        assert output[-1] == tiny.END_ID
        assert added.isdisjoint(output[:-1])
        assert bytes_of(vocabulary, output[:-1]).decode() == expected(form, text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_forced_is_what_masks_allow(kind: str, text: str) -> None:
    """Check the mask behind each token. Drafts and another worker get the same masks."""
    _, vocabulary, _ = tokenizer_of(kind)
    root, output = compile_grammar(schema({"const": text}), vocabulary), list[int]()
    forced = root.anew().forced(output, 1000)
    assert bytes_of(vocabulary, forced).decode() == json.dumps(text)
    for token in forced:
        going_on = root.anew()
        assert tokens_in(going_on.allowed(request(), output)) == [token]
        output.append(token)


@pytest.mark.parametrize("kind", KINDS)
def test_free_text_has_no_added_token_and_may_spell_one(kind: str) -> None:
    backend, vocabulary, added = tokenizer_of(kind)
    fold = compile_grammar(schema({"type": "string"}), vocabulary)
    output = [*backend.encode('"', add_special_tokens=False).ids][-1:]
    for letter in f"{END}{CALL}":
        allowed = tokens_in(_followed(fold, output))
        assert added.isdisjoint(allowed)
        output.append(next(token for token in allowed if vocabulary.decode_bytes([token]) == letter.encode()))


def _followed(root: GrammarState, output: list[int]) -> bytes:
    return root.anew().allowed(request(), output)


@pytest.mark.parametrize("kind", KINDS)
def test_text_without_an_added_token_is_tokenized_as_ever(kind: str) -> None:
    backend, vocabulary, _ = tokenizer_of(kind)
    recognizing = LLTokenizer(backend.to_str())
    for text in ("the fox jumps", " the fox", "a < b | c > d", "<|end| >", "\n\n"):
        assert vocabulary.tokenize_str(text) == recognizing.tokenize_str(text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_grammar_that_names_an_added_token_has_it(kind: str) -> None:
    _, vocabulary, _ = tokenizer_of(kind)
    fold = compile_grammar(lark('start: "a" <|start|> "b"'), vocabulary)
    output = drawn(fold, request(), 1)
    assert tiny.SPECIAL.index("<|start|>") in output
    made = check_grammar(lark('root ::= "<|start|>"'), True, vocabulary)
    assert isinstance(made, Grammar)
    assert tiny.SPECIAL.index("<|start|>") not in drawn(compile_grammar(made, vocabulary), request(), 1)


def test_many_of_them_are_spelled_in_the_time_of_one_pass() -> None:
    """Without a bound this takes minutes."""
    _, vocabulary, added = tokenizer_of("byte level")
    tokens = vocabulary.tokenize_str(f"{END}{CALL}" * 4000)
    assert added.isdisjoint(tokens)
    assert bytes_of(vocabulary, tokens).decode() == f"{END}{CALL}" * 4000
