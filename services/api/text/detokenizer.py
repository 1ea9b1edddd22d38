"""Incremental detokenizer: the text that each new token makes certain.

A character can span several tokens, and a token can hold parts of two characters. A token's text is
therefore held back until what follows can no longer change it. Decoding is relative to the tokens just
before, at first the end of the prompt, because some tokenizers drop a leading space when they decode alone.

Most tokens of most vocabularies are whole characters with the same text everywhere
(`Tokenizer.whole_texts`). If nothing is held back, such a token is a look-up. For all others the reference
library decodes a short window: two decodes of a few tokens each, some microseconds.
`tokenizers.decoders.DecodeStream` is not used for three reasons. It has no flush, so bytes of an unfinished
character at the end would be lost. It raises when later bytes make earlier ones invalid. Over a long run of
invalid bytes it decodes the whole run again at every token.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

REPLACEMENT: Final = "\ufffd"
"""What invalid bytes decode to. At the end of a text it may be a character that is not complete."""
CONTEXT_TOKENS: Final = 8
"""Tokens at the end of the prompt that are decoded with the first output token."""
PENDING_TOKENS_MAX: Final = 64
"""Most tokens held back. No character is that long, so by then the text is invalid for good."""
CUT_TOKENS_MAX: Final = 8


class Codec(Protocol):
    """The methods of `tokenizers.Tokenizer` that are used here. Safe to call from several threads."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def to_str(self) -> str: ...


class NoTexts(dict[int, str | None]):
    """No token has a text of its own: each is decoded."""

    def __missing__(self, _: int) -> None:
        return None


NO_TEXTS: Final[Mapping[int, str | None]] = NoTexts()


class Detokenizer:
    """One output's text, token by token: what all `push`es and the `flush` return is its decoded text."""

    __slots__ = ("_codec", "_ids", "_known", "_known_text", "_skip_special", "_whole_texts")

    def __init__(
        self,
        codec: Codec,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool,
        whole_texts: Mapping[int, str | None] = NO_TEXTS,
    ) -> None:
        """`whole_texts`: text of each token that no other token can change, else None."""
        self._codec = codec
        self._whole_texts = whole_texts
        self._skip_special = skip_special_tokens
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        """The window: tokens whose text was returned, then the pending ones."""
        self._known = len(self._ids)
        self._known_text: str | None = None
        """Text of the known tokens, decoded on demand."""

    def push(self, token_id: int) -> str:
        """Return the text that this token makes certain. "" while a character is incomplete."""
        if self._known == len(self._ids) and (plain := self._whole_texts[token_id]) is not None:
            self._ids, self._known, self._known_text = [token_id], 1, plain
            return plain
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if not text.endswith(REPLACEMENT):
            return self._settle(text, len(self._ids))
        if len(self._ids) - self._known < PENDING_TOKENS_MAX:
            return ""
        cut = self._clean_cut(text)
        return self._settle(self._decode(self._ids[:cut]), cut)

    def flush(self) -> str:
        """Return the text held back, with incomplete bytes as replacement characters. Nothing may follow."""
        if self._known == len(self._ids):
            return ""
        return self._settle(self._decode(self._ids), len(self._ids))

    def _settle(self, text: str, upto: int) -> str:
        """Return what `text`, decoded from the first `upto` tokens of the window, adds. Move the window."""
        known = self._known_text
        if known is None:
            known = self._known_text = self._decode(self._ids[: self._known])
        added = text[len(known) :]
        if not text.startswith(
            known
        ):  # later bytes changed how earlier ones decode; what was returned stands
            added = self._decode(self._ids[self._known : upto])
        if added:
            del self._ids[: self._known]
            self._known = upto - self._known
            self._known_text = None
        elif upto - self._known >= PENDING_TOKENS_MAX:
            del self._ids[self._known : upto]  # tokens without text
        return added

    def _clean_cut(self, text: str) -> int:
        """Return the last index at which the window can be cut between characters, or its end."""
        end = len(self._ids)
        for cut in range(end - 1, max(end - CUT_TOKENS_MAX, self._known), -1):
            if self._decode(self._ids[:cut]) + self._decode(self._ids[cut:]) == text:
                return cut
        return end

    def _decode(self, ids: Sequence[int]) -> str:
        return self._codec.decode(ids, skip_special_tokens=self._skip_special)
