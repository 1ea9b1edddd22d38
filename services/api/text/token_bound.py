"""Lower bound on the number of tokens of a text, from its length alone.

A token covers at most as many bytes as the longest entry of the vocabulary. The bound counts every byte that
must be part of some token. It does not count what the tokenizer may drop: characters that the vocabulary
lacks, or whitespace next to an added token. There is no bound if the normalizer may shorten a text by any
amount, or if the tokenizer makes one token of any unknown word.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from baton.api.text.byte_alphabet import byte_letters

SHRINKS: Final[Mapping[str, int]] = {
    "ByteLevel": 1,
    "Lowercase": 3,
    "NFC": 4,
    "NFD": 3,
    "NFKC": 4,
    "NFKD": 4,
    "Prepend": 1,
    "Strip": 1,
}
"""Largest factor by which a step of a tokenizer's normalizer may shorten the UTF-8 of a text, by type of
step. For Strip, whitespace does not count."""
ADDS_ONLY: Final = frozenset({"ByteLevel", "Prepend"})
"""Types of normalizer steps that keep every character of a text, and only add characters or write them
otherwise."""
DROPS_NOTHING: Final = frozenset(
    {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}
)
"""Pre-tokenizer steps that split a text into words and drop no character."""
DROPS_WHITESPACE: Final = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
"""Pre-tokenizer steps that drop the whitespace between words, and nothing else."""
COVERS_CHARACTERS: Final = frozenset({"BPE", "Unigram"})
"""Types of tokenizer model in which each character of a text becomes part of a token, if the vocabulary has
it."""
REMOVED: Final = "Removed"
ASCII: Final = range(0x80)
UTF8_BYTES: Final = (*ASCII, *range(0x80, 0xC0), *range(0xC2, 0xF5))
"""All byte values that occur in UTF-8."""
WHITESPACE: Final = tuple(chr(code) for code in range(0x3001) if chr(code).isspace())
ASCII_SPACES: Final = "".join(each for each in WHITESPACE if each.isascii()).encode()
WIDE_SPACES: Final = tuple(each for each in WHITESPACE if not each.isascii())
LONG_TOKENS_MAX: Final = 64
"""Most added tokens that are counted separately, because each covers more bytes than any ordinary token."""


class NoBound(Exception):
    """Error: the length of a text gives no lower bound on its tokens. The message is the reason."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """Parameters of the lower bound on token counts for one tokenizer: bytes that count, and how many of them
    one token covers."""

    bytes_per_token: int
    uncounted: bytes
    """Byte values that the bound does not count, because they may become part of no token."""
    counts_wide_spaces: bool
    """Whether the bound counts whitespace characters beyond ASCII. Some tokenizers drop or replace them."""
    long_tokens: tuple[str, ...]
    """Texts of added tokens that are longer than `bytes_per_token`. The bound leaves out each of them that a
    text contains."""

    def counted_bytes(self, text: str) -> int:
        """Return how many bytes of `text` surely become part of ordinary tokens, which is what the bound
        counts."""
        raw = text.encode("utf-8", "surrogatepass")
        size = len(raw.translate(None, self.uncounted))
        if not self.counts_wide_spaces and len(raw) > len(text):
            size -= sum(text.count(each) * len(each.encode()) for each in WIDE_SPACES)
        size -= sum(text.count(each) * _size(each) for each in self.long_tokens)
        return max(size, 0)


class TokenBound:
    """Lower bound on the number of tokens of a text, for one tokenizer."""

    def __init__(self, backend: Any) -> None:
        """Compute the lower bound on token counts for a tokenizer. If there is none, set `unknown_because`.
        `backend`: a `tokenizers.Tokenizer`."""
        self._bound: _Bound | None = None
        self.unknown_because = ""
        """Reason why there is no bound; empty if there is one."""
        try:
            self._bound = _bound_of(backend)
        except NoBound as reason:
            self.unknown_because = str(reason)

    @property
    def bytes_per_token(self) -> int | None:
        """Most bytes of a text that one token covers; None if there is no bound."""
        return None if self._bound is None else self._bound.bytes_per_token

    def least(self, text: str) -> int:
        """Return a lower bound on the number of tokens of `text`, without special tokens around it; 0 if
        there is no bound."""
        if self._bound is None:
            return 0
        return -(-self._bound.counted_bytes(text) // self._bound.bytes_per_token)


def _bound_of(backend: Any) -> _Bound:
    """Return the parameters of a tokenizer's bound. `backend`: a `tokenizers.Tokenizer`. Raises NoBound."""
    kind = type(backend.model).__name__
    if kind not in COVERS_CHARACTERS:
        raise NoBound(f"the model of the tokenizer is {kind}, where one token may stand for any word")
    normalizer = [*_steps(backend.normalizer, "normalizers")]
    pre_tokenizer = [*_steps(backend.pre_tokenizer, "pretokenizers")]
    shrinks = _shrinks(normalizer)
    byte_level = any(step["type"] == "ByteLevel" for step in (*normalizer, *pre_tokenizer))
    uncounted = _uncovered_bytes(backend, normalizer, byte_level=byte_level)
    added = tuple(backend.get_added_tokens_decoder().values())
    keeps_whitespace = not (
        _drops_whitespace(normalizer, pre_tokenizer) or any(each.lstrip or each.rstrip for each in added)
    )
    if not keeps_whitespace:
        uncounted = bytes({*uncounted, *ASCII_SPACES})
    texts = {each.content for each in added}
    own = [piece for piece in backend.get_vocab(with_added_tokens=True) if piece not in texts]
    longest = max([1, *(map(len, own) if byte_level else map(_size, own))])
    long_tokens = _long_tokens(backend, added, longest)
    others = (each.content for each in added if each.content not in long_tokens)
    longest = max([longest, *(_size_added(backend, each) for each in others)])
    return _Bound(longest * shrinks, uncounted, keeps_whitespace, long_tokens)


def _long_tokens(backend: Any, added: Sequence[Any], longest: int) -> tuple[str, ...]:
    """Return the texts of added tokens that are longer than any ordinary token, the longest first. Added
    tokens that the normalizer changes are left out. `longest`: bytes of the longest ordinary token."""
    spelled = [each.content for each in added if backend.normalizer is None or not each.normalized]
    longer = sorted((each for each in spelled if _size(each) > longest), key=_size, reverse=True)
    return tuple(longer[:LONG_TOKENS_MAX])


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _size_added(backend: Any, content: str) -> int:
    """Return the most bytes that an added token may cover in a text. The tokenizer may search for it in the
    normalised text, so the longer spelling counts."""
    normalised = content if backend.normalizer is None else backend.normalizer.normalize_str(content)
    return max(_size(content), _size(normalised))


def _shrinks(normalizer: Sequence[Mapping[str, Any]]) -> int:
    """Return the largest factor by which all normalizer steps together may shorten the UTF-8 of a text.
    Raises NoBound."""
    factor = 1
    for step in normalizer:
        if step["type"] == "Replace":
            pattern, content = step["pattern"].get("String"), step["content"]
            if not pattern or not content:
                raise NoBound("a step Replace of its normalizer may shorten a text")
            factor *= max(1, -(-_size(pattern) // _size(content)))
        elif step["type"] in SHRINKS:
            factor *= SHRINKS[step["type"]]
        else:
            raise NoBound(f"the step {step['type']} of its normalizer may shorten a text")
    return factor


def _drops_whitespace(
    normalizer: Sequence[Mapping[str, Any]], pre_tokenizer: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether the tokenizer may drop whitespace of a text. Raises NoBound if it may drop other
    characters."""
    drops = any(step["type"] == "Strip" for step in normalizer)
    for step in pre_tokenizer:
        if step["type"] in DROPS_WHITESPACE:
            drops = True
        elif step["type"] not in DROPS_NOTHING or step.get("behavior") == REMOVED:
            raise NoBound(f"the step {step['type']} of its pre-tokenizer may drop some of a text")
    if drops and any(step["type"] == "Replace" for step in normalizer):
        raise NoBound("a step of its normalizer may make whitespace, which another step drops")
    return drops


def _steps(part: Any, several: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a tokenizer's normalizer or pre-tokenizer as JSON objects, also those in nested
    sequences. `several`: name of the field that lists a sequence's steps."""
    if part is None:
        return
    waiting = [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting += step[several]
        else:
            yield step


def _uncovered_bytes(backend: Any, normalizer: Sequence[Mapping[str, Any]], *, byte_level: bool) -> bytes:
    """Return the byte values that may get no token, because they are dropped or because many become one
    token. Raises NoBound."""
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if byte_level:
        covered = {byte for letter, byte in byte_letters().items() if _has(backend, vocabulary, letter)}
    else:
        covered = _covered_by_characters(backend, vocabulary)
    uncovered = [byte for byte in UTF8_BYTES if byte not in covered]
    if not covered:
        raise NoBound("its vocabulary has no token for any byte")
    if uncovered and any(step["type"] not in ADDS_ONLY for step in normalizer):
        raise NoBound("its normalizer may turn a text into characters that its vocabulary lacks")
    return bytes(uncovered)


def _has(backend: Any, vocabulary: Collection[str], letter: str) -> bool:
    """Return whether the vocabulary has a token for `letter` at the start, in the middle and at the end of a
    word. Some tokenizers spell these tokens with a prefix or a suffix."""
    prefix = getattr(backend.model, "continuing_subword_prefix", None) or ""
    suffix = getattr(backend.model, "end_of_word_suffix", None) or ""
    return all(
        before + letter + behind in vocabulary for before, behind in product({"", prefix}, {"", suffix})
    )


def _covered_by_characters(backend: Any, vocabulary: Collection[str]) -> set[int]:
    """Return the byte values that surely get a token, for a vocabulary of characters. A space counts only if
    every byte does, because it may be replaced before."""
    by_fallback = set()
    if _falls_back(backend.model):
        by_fallback = {byte for byte in UTF8_BYTES if f"<0x{byte:02X}>" in vocabulary}
    if by_fallback.issuperset(UTF8_BYTES):
        return by_fallback
    if type(backend.model).__name__ == "Unigram":
        by_fallback = set()  # a run of unknown characters is one token if one of them has no bytes
    covered = {byte for byte in ASCII if byte in by_fallback or _has(backend, vocabulary, chr(byte))}
    if by_fallback.issuperset(set(UTF8_BYTES) - set(ASCII)):
        covered |= by_fallback
    return covered - {ord(" ")}


def _falls_back(model: Any) -> bool:
    """Return whether a tokenizer model writes an unknown character as tokens of its bytes."""
    if hasattr(model, "byte_fallback"):
        return bool(model.byte_fallback)
    return bool(json.loads(model.__getstate__()).get("byte_fallback"))
