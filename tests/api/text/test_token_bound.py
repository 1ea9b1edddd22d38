"""The lower bound of a text's tokens holds for every tokenizer; a text without one is counted in pieces."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from baton.api.served_model import log_floor
from baton.api.text.byte_alphabet import byte_letters
from baton.api.text.token_bound import SHRINKS, TokenBound
from baton.api.text.tokenizer import PIECE_CHARS, WHOLE_BYTES_MAX, TooManyTokens, load_tokenizer
from baton.api.text.tokenizer import Tokenizer as BatonTokenizer
from tests.api import tiny


def byte_level() -> Any:
    return Tokenizer.from_str(tiny.byte_level().backend_tokenizer.to_str())


def without(letters: str) -> Any:
    """The byte-level tokenizer whose vocabulary lacks some letters, and all pieces with one of them."""
    model = json.loads(byte_level().model.__getstate__())
    pieces = [each for each in model["vocab"] if not set(each) & set(letters)]
    merges = [
        (one, two) for one, two in model["merges"] if one in pieces and two in pieces and one + two in pieces
    ]
    backend = byte_level()
    backend.model = models.BPE({piece: at for at, piece in enumerate(pieces)}, merges)
    return backend


def of_model(model: Any, pre_tokenizer: Any = None, normalizer: Any = None) -> Any:
    backend = Tokenizer(model)
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


FALLBACK: Final = [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
WORDS: Final = [
    ("<unk>", 0.0),
    ("\u2581", -3.0),
    ("\u2581the", -2.0),
    ("fox", -2.0),
    *((each, -4.0) for each in "abcfoxqu\n"),
]
DEMO_LACKS: Final = (4, 6, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100))
BYTES: Final = pre_tokenizers.ByteLevel(add_prefix_space=False)
LONG_TOKEN: Final = "<|" + "long" * 500 + "|>"


def backends() -> dict[str, Any]:
    """Tokenizers of each kind that has a bound."""
    spaced = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tiny.byte_level().backend_tokenizer.to_str())
    )
    spaced.add_tokens([AddedToken("<|wide|>", lstrip=True, rstrip=True, special=True)])
    composed = byte_level()
    composed.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    long_token = byte_level()
    long_token.add_special_tokens([AddedToken(LONG_TOKEN, special=True, normalized=False)])
    stripped = byte_level()
    stripped.normalizer = normalizers.Strip()
    words_only = byte_level()
    words_only.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    characters = {each: at for at, each in enumerate(["<unk>", *"abcdefghijklmnopqrstuvwxyz ."])}
    ended = {each + end: 2 * at + bool(end) for at, each in enumerate("abcdefgh") for end in ("", "</w>")}
    metaspace = pre_tokenizers.Metaspace()
    return {
        "byte level": tiny.byte_level().backend_tokenizer,
        "byte fallback": tiny.byte_fallback().backend_tokenizer,
        "an added token that takes whitespace": spaced.backend_tokenizer,
        "normalised": composed,
        "a byte level that lacks bytes outside UTF-8": without("\xc0\xc1\xf5\xff"),
        "a byte level that lacks letters": without("\xc0\xf1\xf2\u0104\u0106Tqe"),
        "a very long added token": long_token,
        "a normalizer that strips": stripped,
        "a pre-tokenizer that drops whitespace": words_only,
        "BPE of characters, one token for unknown ones": of_model(
            models.BPE(characters, [], unk_token="<unk>", fuse_unk=True)
        ),
        "BPE of characters, unknown ones dropped": of_model(models.BPE(characters, [])),
        "BPE with another form at the end of a word": of_model(
            models.BPE(ended, [], end_of_word_suffix="</w>"), pre_tokenizers.Punctuation()
        ),
        "Unigram with bytes": of_model(models.Unigram([*WORDS, *FALLBACK], 0, True), metaspace),
        "Unigram that lacks a byte": of_model(
            models.Unigram([*WORDS, *(each for each in FALLBACK if each[0] != "<0x04>")], 0, True), metaspace
        ),
        "Unigram": of_model(models.Unigram(WORDS, 0, False), metaspace),
    }


BACKENDS: Final = backends()
TEXTS: Final = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.sampled_from(
            ["The quick brown fox", " " * 50, "\n\t ", "<|end|>", "  <|wide|> \u3000 ", "e\u0301" * 9]
        ),
        st.sampled_from(
            ["\u1fbe\u0308\u0301", "\u212a", "𝟎" * 9, "한국" * 5, "▁▁▁", "<0x41>", "你", "\u00a0"]
        ),
        st.sampled_from(
            [LONG_TOKEN, LONG_TOKEN[:-1], "\x04" * 50, "T\x04e", "\U00050000", "the fox", "zz\x04z"]
        ),
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("kind", BACKENDS)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_its_length_tells(kind: str, text: str) -> None:
    backend = BACKENDS[kind]
    tokens = len(backend.encode(text, add_special_tokens=False))
    assert TokenBound(backend).least(text) <= tokens


def test_the_floor_is_not_nothing_and_grows_with_the_text() -> None:
    for kind, backend in BACKENDS.items():
        floor = TokenBound(backend)
        assert floor.unknown_because == "", kind
        assert floor.least("abc def " * 10_000) > 300, kind
        assert floor.least("abc def " * 20_000) >= 2 * floor.least("abc def " * 10_000) - 1
    assert TokenBound(BACKENDS["an added token that takes whitespace"]).least(" \u3000\n" * 10_000) == 0


def test_a_very_long_added_token_does_not_make_the_floor_low() -> None:
    floor, plain = TokenBound(BACKENDS["a very long added token"]), TokenBound(byte_level())
    assert floor.least("1" * 100_000) == plain.least("1" * 100_000)
    assert floor.least(LONG_TOKEN * 100) == 0


NO_BOUND: Final[dict[str, tuple[Any, str]]] = {
    "WordLevel": (of_model(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")), "WordLevel"),
    "WordPiece": (of_model(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")), "WordPiece"),
    "nothing known": (of_model(models.BPE({"<unk>": 0}, [], unk_token="<unk>", fuse_unk=True)), "any byte"),
    "a normalizer of a table": (
        of_model(models.Unigram([*WORDS, *FALLBACK], 0, True), None, normalizers.Nmt()),
        "the step Nmt of its normalizer",
    ),
    "a normalizer by a pattern": (
        of_model(models.Unigram([*WORDS, *FALLBACK], 0, True), None, normalizers.Replace(Regex(" +"), " ")),
        "Replace",
    ),
    "a normalizer into unknown characters": (
        of_model(models.BPE({"a": 0}, []), None, normalizers.Lowercase()),
        "its normalizer may turn a text into characters that its vocabulary lacks",
    ),
    "a pre-tokenizer that removes": (
        of_model(byte_level().model, pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTES])),
        "the step Split of its pre-tokenizer",
    ),
    "whitespace that is made and then dropped": (
        of_model(
            byte_level().model,
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTES]),
            normalizers.Replace("a", " "),
        ),
        "may make whitespace",
    ),
}


@pytest.mark.parametrize("kind", NO_BOUND)
def test_a_tokenizer_that_drops_or_joins_anything_has_no_floor_and_a_reason(kind: str) -> None:
    backend, reason = NO_BOUND[kind]
    floor = TokenBound(backend)
    assert floor.least("a b " * 100_000) == 0
    assert floor.bytes_per_token is None
    assert reason in floor.unknown_because


class Watched:
    """A backend whose longest text, and their sum, are recorded."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.longest = self.chars = 0

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
        self.longest = max(self.longest, *map(len, texts))
        self.chars += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("reference", [tiny.byte_level, tiny.byte_fallback])
def test_a_long_text_is_counted_in_pieces_and_no_further_than_it_takes(
    reference: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer without a floor, or a long context: the tokens bound the work."""
    tokenizer = BatonTokenizer(reference())
    watched = Watched(tokenizer.codec)
    monkeypatch.setattr(tokenizer, "_backend", watched)
    with pytest.raises(TooManyTokens) as refused:
        tokenizer.encode("1" * 4_190_000, add_special_tokens=True, most=50_000)
    assert (refused.value.tokens, refused.value.counted_all) == (50_000, False)
    assert watched.longest <= PIECE_CHARS
    assert watched.chars <= 2 * 50_000 + 2 * PIECE_CHARS


def test_a_long_text_that_fits_has_the_tokens_that_it_has_as_a_whole() -> None:
    tokenizer = BatonTokenizer(tiny.byte_level())
    text = "The quick brown fox jumps over the lazy dog. " * 8000
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert len(text) > WHOLE_BYTES_MAX
    assert tokenizer.encode(text, add_special_tokens=False, most=len(whole)) == whole
    with pytest.raises(TooManyTokens) as refused:
        tokenizer.encode(text, add_special_tokens=False, most=len(whole) - 1)
    assert refused.value.counted_all, "so near the bound the text is counted whole"


def test_an_added_token_that_a_cut_divides_does_not_refuse_a_text_that_fits() -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(BACKENDS["a very long added token"].to_str())
    )
    tokenizer = BatonTokenizer(reference)
    text = LONG_TOKEN * 200
    assert len(tokenizer.encode(text, add_special_tokens=False, most=200)) == 200


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (models.BPE, "refused by their length, before tokenising"),
        (models.WordLevel, "their length bounds none"),
    ],
)
def test_the_start_logs_whether_a_text_is_refused_by_its_length(
    model: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    backend = byte_level() if model is models.BPE else NO_BOUND["WordLevel"][0]
    log_floor(TokenBound(backend))
    (record,) = caplog.records
    assert message in record.getMessage()


def test_the_demos_own_tokenizer_has_a_floor() -> None:
    """The demo tokenizer's vocabulary lacks 21 byte letters: 13 for bytes outside UTF-8, and 8 that are
    dropped."""
    letters = "".join(letter for letter, byte in byte_letters().items() if byte in DEMO_LACKS)
    floor = TokenBound(without(letters))
    assert floor.least("1" * 4_190_000) > 100_000
    assert floor.least("\x04\x06" * 100_000) == 0


def test_the_demos_tokenizer_refuses_a_long_text_before_it_is_tokenised(demo_model_dir: Path) -> None:
    tokenizer = load_tokenizer(demo_model_dir)
    assert tokenizer.floor.unknown_because == ""
    assert tokenizer.least_tokens("1" * 4_190_000) > 50_000
    for text in (
        "1" * 500,
        "\x04" * 500,
        "a\x04 b\x06" * 99,
        "\U00050000" * 99,
        "Hello, world. " * 50,
        " " * 999,
    ):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_no_normal_form_shrinks_a_text_more_than_is_said(form: Any) -> None:
    """The test covers all characters, and the longest character that can become a part of each."""
    parts_form: Any = "NFKD" if "K" in form else "NFD"
    every = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    chars = [char for char in every if not unicodedata.is_normalized(parts_form, char)]
    parts = {char: unicodedata.normalize(parts_form, char) for char in chars}
    longest: dict[str, int] = {}
    for char, part in parts.items():
        if len(part) == 1:
            longest[part] = max(longest.get(part, 0), len(char.encode()))
    most = max(
        *(size / len(part.encode()) for part, size in longest.items()),
        *(
            sum(longest.get(each, len(each.encode())) for each in parts[char]) / len(char.encode())
            for char in chars
            if unicodedata.normalize(form, char) == char
        ),
    )
    assert 1 < most <= SHRINKS[form]
