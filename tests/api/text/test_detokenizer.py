"""Tests that the pieces of a text join to what the reference library decodes."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.text.detokenizer import PENDING_TOKENS_MAX, Detokenizer
from baton.api.text.tokenizer import Tokenizer
from tests.api import tiny

REAL = (
    "The capital of France is Paris.",
    "Zürich, naïve façade; 東京 こんにちは 你好世界。",
    "😀😃👩‍👩‍👧‍👦🇫🇷 flags and families 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "मनीष مرحبا שלום ไทย 한국어",
    "def f(x):\n\treturn {'a': x}\n\n\n    # end\r\n",
    " leading, trailing and   runs  ",
    "\ufffd a real replacement character \ufffd\ufffd",
)


def pieces(reference: Any, prompt: list[int], output: list[int], skip: bool = True) -> list[str]:
    """Return the pieces of an output, with and without texts of single tokens."""
    tokenizer = Tokenizer(reference)
    found = []
    for more in ({"whole_texts": tokenizer.whole_texts}, {}):
        detokenizer = Detokenizer(tokenizer.codec, prompt, skip_special_tokens=skip, **more)
        found.append([*(detokenizer.push(each) for each in output), detokenizer.flush()])
    assert found[0] == found[1]
    return found[0]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 419), max_size=80), st.booleans(), st.lists(st.integers(3, 60), max_size=3))
def test_any_byte_level_tokens(output: list[int], skip: bool, prompt: list[int]) -> None:
    """Invalid bytes, half characters and special tokens included: equal to decoding all at once."""
    reference = tiny.byte_level()
    prompt = [*prompt, *tiny.ids("end")]
    size = len(reference)
    output = [each % size for each in output]
    whole = reference.backend_tokenizer.decode(output, skip_special_tokens=skip)
    assert "".join(pieces(reference, prompt, output, skip)) == whole


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 419), max_size=40), st.lists(st.integers(0, 419), max_size=12), st.booleans())
def test_a_prompt_that_ends_anywhere(output: list[int], prompt: list[int], skip: bool) -> None:
    """A prompt may end within a character."""
    reference = tiny.byte_level()
    size = len(reference)
    pieces(reference, [each % size for each in prompt], [each % size for each in output], skip)


def test_a_token_of_whole_characters_is_looked_up_and_not_decoded() -> None:
    """This holds however long the output is."""
    reference, decoded = tiny.byte_level(), 0

    class Counting:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            nonlocal decoded
            decoded += 1
            text: str = reference.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            return text

    codec: Any = Counting()
    detokenizer = Detokenizer(
        codec, [5], skip_special_tokens=True, whole_texts=Tokenizer(reference).whole_texts
    )
    output = tiny.ids("The quick fox. ") * 500
    assert "".join(map(detokenizer.push, output)) == "The quick fox. " * 500
    assert decoded == 0
    detokenizer.push(reference.convert_tokens_to_ids("ð"))
    assert decoded == 1


@pytest.mark.parametrize("text", REAL)
def test_real_text(text: str) -> None:
    reference = tiny.byte_level()
    output = tiny.ids(text)
    assert "".join(pieces(reference, tiny.ids("Say: "), output)) == text


@pytest.mark.parametrize("text", REAL[:6])
@pytest.mark.parametrize("skip", [True, False])
def test_real_text_with_the_demo_tokenizer(demo_tokenizer: Any, text: str, skip: bool) -> None:
    output = demo_tokenizer(text, add_special_tokens=False).input_ids
    prompt = demo_tokenizer("<|im_start|>assistant\n", add_special_tokens=False).input_ids
    given_out = pieces(demo_tokenizer, prompt, output, skip)
    assert "".join(given_out) == demo_tokenizer.decode(output, skip_special_tokens=skip) == text


@settings(max_examples=100, deadline=None)
@given(output=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
def test_any_tokens_of_the_demo_tokenizer(demo_tokenizer: Any, output: list[int], skip: bool) -> None:
    whole = demo_tokenizer.decode(output, skip_special_tokens=skip)
    assert "".join(pieces(demo_tokenizer, [198], output, skip)) == whole


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["the", " the", " fox", "a", "b", "é", " é", "你", "😀", "ß", ".", " ", "\n"]))
)
def test_byte_fallback_text_continues_the_prompt(words: list[str]) -> None:
    """The decoder drops the first space of what it is given; an output's first space must survive."""
    reference = tiny.byte_fallback()
    backend = reference.backend_tokenizer
    prompt = backend.encode("Hello", add_special_tokens=False).ids
    output = backend.encode("Hello" + "".join(words), add_special_tokens=False).ids[len(prompt) :]
    assert "".join(pieces(reference, prompt, output)) == "".join(words)


def test_tokens_without_text_do_not_eat_the_space_behind_them() -> None:
    reference = tiny.byte_fallback()
    output = reference.convert_tokens_to_ids(["▁Hello", "<|start|>", "<|start|>", "▁the"])
    assert pieces(reference, [], output) == ["Hello", "", "", " the", ""]


def test_an_emoji_split_over_tokens_goes_out_whole() -> None:
    reference = tiny.byte_fallback()
    output = [reference.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "😀".encode()]
    assert pieces(reference, [], output) == ["", "", "", "😀", ""]


def test_text_goes_out_with_the_token_that_completes_it() -> None:
    reference = tiny.byte_level()
    output = tiny.ids("The quick fox")
    given_out = pieces(reference, tiny.ids("x"), output)
    assert given_out == [*(reference.decode([each]) for each in output), ""]


def test_unfinished_bytes_come_out_at_the_end() -> None:
    reference = tiny.byte_level()
    broken = reference.convert_tokens_to_ids("ð")  # the first of an emoji's four bytes
    assert pieces(reference, tiny.ids("x"), [*tiny.ids("a"), broken]) == ["a", "", "\ufffd"]


@pytest.mark.parametrize("kind", [tiny.byte_level, tiny.byte_fallback])
@pytest.mark.parametrize("piece", ["<|start|>", "broken"])
def test_what_is_held_back_is_bounded(kind: Any, piece: str) -> None:
    """Endless invalid bytes or endless tokens without text: the window that is decoded stays small."""
    reference = kind()
    names = {tiny.byte_level: "ð", tiny.byte_fallback: "<0xF0>"}
    id_ = reference.convert_tokens_to_ids(names[kind] if piece == "broken" else piece)
    widest = 0

    class Watching:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            nonlocal widest
            widest = max(widest, len(ids))
            text: str = reference.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            return text

    detokenizer = Detokenizer(Watching(), [], skip_special_tokens=True)  # type: ignore[arg-type]
    text = "".join(detokenizer.push(id_) for _ in range(1000)) + detokenizer.flush()
    assert text == ("" if piece == "<|start|>" else "\ufffd" * 1000)
    assert widest <= 3 * PENDING_TOKENS_MAX


def test_bytes_that_turn_invalid_later_take_nothing_back() -> None:
    """A byte-fallback decoder condemns a whole run of bytes for one wrong one; sent text stays sent."""
    reference = tiny.byte_fallback()
    run = [reference.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in (*"你".encode(), 0xFF)]
    output = [*run, reference.convert_tokens_to_ids("a")]
    assert pieces(reference, [], output) == ["", "", "你", "", "\ufffda", ""]
