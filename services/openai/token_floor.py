"""How many tokens does a text have at least? Told by its length, without tokenising it.

A token stands for so many bytes at most: the longest of the vocabulary. That holds as long as every byte of
the text comes to stand in some token. What a tokenizer does before that may shrink a text (normalise it), or
drop some of it (unknown characters, whitespace beside an added token). Where it cannot be said by how much,
nothing is said of any text.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from services.openai.byte_letters import byte_letters

SHRINKS: Final[Mapping[str, int]] = {
    "ByteLevel": 1,
    "Lowercase": 3,
    "NFC": 4,
    "NFD": 3,
    "NFKC": 4,
    "NFKD": 4,
    "Prepend": 1,
}
"""By how much at most a step makes a text's UTF-8 shorter; steps that are not here may do anything."""
KEEPS_ALL: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"})
"""Steps that cut a text in words and drop nothing of it."""
REMOVED: Final = "Removed"
BYTES: Final = 256
WHITESPACE: Final = tuple(chr(code) for code in range(0x3001) if chr(code).isspace())
ASCII_SPACES: Final = "".join(each for each in WHITESPACE if each.isascii()).encode()


class TokenFloor:
    """Of one tokenizer."""

    def __init__(self, backend: Any) -> None:
        """`backend` is a `tokenizers.Tokenizer`."""
        added = backend.get_added_tokens_decoder().values()
        self._spaces_count = not any(each.lstrip or each.rstrip for each in added)
        self._bytes_a_token = _bytes_a_token(backend)
        """None: nothing is known."""

    def least(self, text: str) -> int:
        """Tokens of `text`, without special ones that are added around it."""
        if self._bytes_a_token is None:
            return 0
        size = _size(text)
        if not self._spaces_count:
            size -= _spaces(text)
        return -(-size // self._bytes_a_token)


def _bytes_a_token(backend: Any) -> int | None:
    shrinks = 1
    for step in _steps(backend.normalizer, "normalizers"):
        by = _shrinks(step)
        if by is None:
            return None
        shrinks *= by
    for step in _steps(backend.pre_tokenizer, "pretokenizers"):
        if step["type"] not in KEEPS_ALL or step.get("behavior") == REMOVED:
            return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    byte_level = _is_byte_level(backend)
    if not _covers_all_bytes(backend, vocabulary, byte_level=byte_level):
        return None
    added = {each.content for each in backend.get_added_tokens_decoder().values()}
    own = [piece for piece in vocabulary if piece not in added]
    sizes = map(len, own) if byte_level else map(_size, own)
    return max(*sizes, *(_size_added(backend, each) for each in added), 1) * shrinks


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _size_added(backend: Any, content: str) -> int:
    """Some are looked for in the normalised text."""
    normalised = content if backend.normalizer is None else backend.normalizer.normalize_str(content)
    return max(_size(content), _size(normalised))


def _shrinks(step: Mapping[str, Any]) -> int | None:
    if step["type"] != "Replace":
        return SHRINKS.get(step["type"])
    pattern, content = step["pattern"].get("String"), step["content"]
    if not pattern or not content:
        return None
    return max(1, -(-len(pattern.encode()) // len(content.encode())))


def _steps(part: Any, several: str) -> Iterator[Mapping[str, Any]]:
    """A normaliser's, or a pre-tokeniser's."""
    if part is None:
        return
    state = json.loads(part.__getstate__())
    waiting = [state]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting += step[several]
        else:
            yield step


def _is_byte_level(backend: Any) -> bool:
    """Each byte is a letter of the vocabulary's own."""
    before = [*_steps(backend.normalizer, "normalizers"), *_steps(backend.pre_tokenizer, "pretokenizers")]
    return any(step["type"] == "ByteLevel" for step in before)


def _covers_all_bytes(backend: Any, vocabulary: Mapping[str, int], *, byte_level: bool) -> bool:
    """Whether there is a token for everything: what has none is dropped, or many of it become one."""
    model = backend.model
    if byte_level:
        return type(model).__name__ == "BPE" and all(letter in vocabulary for letter in byte_letters())
    if not getattr(model, "byte_fallback", False):
        return False
    return all(f"<0x{byte:02X}>" in vocabulary for byte in range(BYTES))


def _spaces(text: str) -> int:
    """Bytes of whitespace, in UTF-8."""
    raw = text.encode("utf-8", "surrogatepass")
    spaces = len(raw) - len(raw.translate(None, ASCII_SPACES))
    if not text.isascii():
        spaces += sum(text.count(each) * len(each.encode()) for each in WHITESPACE if not each.isascii())
    return spaces
