"""Incremental detokenizer, which returns the text that no later token can change.

A character can span several tokens, and a token can hold parts of two characters. So the text of a token is
held back until later tokens can no longer change it. A token is decoded together with the tokens just before
it, at first the end of the prompt, because some tokenizers drop a leading space.

Most tokens of most vocabularies are whole characters with the same text everywhere (`Tokenizer.whole_texts`).
If nothing is held back, such a token only needs a look-up. For all other tokens the reference library decodes
a short window: two decodes of a few tokens each, some microseconds. `tokenizers.decoders.DecodeStream` is not
used for three reasons. It has no flush, so bytes of an unfinished character at the end would be lost. It
raises when later bytes make earlier ones invalid. Over a long run of invalid bytes it decodes the whole run
again at every token.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

REPLACEMENT: Final = "\ufffd"
"""Character to which invalid bytes decode. At the end of a text it may stand for an incomplete character."""
CONTEXT_TOKENS: Final = 8
"""Number of tokens at the end of the prompt that are decoded together with the first output token."""
PENDING_TOKENS_MAX: Final = 64
"""Most tokens whose text is held back as incomplete. No character has that many tokens, so their bytes must
be invalid."""
CUT_TOKENS_MAX: Final = 8


class Codec(Protocol):
    """Interface of the methods of `tokenizers.Tokenizer` that the detokenizer uses. They may be called from
    several threads."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def to_str(self) -> str: ...


class NoTexts(dict[int, str | None]):
    """Map from token id to text in which every text is None, so that the detokenizer decodes each token."""

    def __missing__(self, _: int) -> None:
        return None


NO_TEXTS: Final[Mapping[int, str | None]] = NoTexts()


class Detokenizer:
    """Incremental detokenizer of one choice. The texts that all `push` calls and `flush` return join to the
    decoded output."""

    __slots__ = ("_codec", "_ids", "_known", "_known_text", "_skip_special", "_whole_texts")

    def __init__(
        self,
        codec: Codec,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool,
        whole_texts: Mapping[int, str | None] = NO_TEXTS,
    ) -> None:
        """Start a detokenizer for the output after `prompt`.

        `whole_texts`: for each token id, the token's text, or None if the text depends on other tokens.
        """
        self._codec = codec
        self._whole_texts = whole_texts
        self._skip_special = skip_special_tokens
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        """Ids of the tokens to decode together (the window): first tokens whose text was returned, then those
        whose text is held back."""
        self._known = len(self._ids)
        self._known_text: str | None = None
        """Decoded text of those window tokens whose text was already returned. None until it is needed."""

    def push(self, token_id: int) -> str:
        """Add an output token, and return the text that has become final; "" while a character is
        incomplete."""
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
        """Return the text still held back, at the end of the output. Incomplete bytes become replacement
        characters. No token may be pushed afterwards."""
        if self._known == len(self._ids):
            return ""
        return self._settle(self._decode(self._ids), len(self._ids))

    def _settle(self, text: str, upto: int) -> str:
        """Return the part of `text` that was not returned before, and drop settled tokens from the window.

        `text`: text of the first `upto` tokens of the window.
        """
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
        """Return the last number of window tokens after which the decoded text can be cut between two
        characters. Return the window's length if no cut is possible."""
        end = len(self._ids)
        for cut in range(end - 1, max(end - CUT_TOKENS_MAX, self._known), -1):
            if self._decode(self._ids[:cut]) + self._decode(self._ids[cut:]) == text:
                return cut
        return end

    def _decode(self, ids: Sequence[int]) -> str:
        return self._codec.decode(ids, skip_special_tokens=self._skip_special)
