"""Which text has become certain with the latest token?

A character can span several tokens, and a token can hold parts of two characters, so a token's text is
held back until what follows can no longer change it. Decoding is relative to the tokens just before (at
first the end of the prompt), because some tokenizers drop a leading space when they decode on their own.

Most tokens of most vocabularies are whole characters, whose text is the same wherever they stand
(`Tokenizer.alone`): with nothing held back, such a token is a look-up. For all others the reference
library's decoder does the decoding, over a short window: two decodes of a few tokens each, some
microseconds. `tokenizers.decoders.DecodeStream` is not used: it has no flush (bytes of an unfinished
character at the end would be lost), it raises when later bytes make earlier ones invalid, and over a long
run of invalid bytes it decodes the whole run again at every token.
"""

from collections.abc import Callable, Sequence
from typing import Final

from baton.api.text.tokenizer import Codec

REPLACEMENT: Final = "\ufffd"
"""What bytes that form no character decode to; at the end of a text it may be a character to come."""
CONTEXT_TOKENS: Final = 8
"""Tokens of the prompt that the first output token is decoded after."""
PENDING_TOKENS_MAX: Final = 64
"""Tokens held back at most; no character is that long, so by then the text is damaged for good."""
CUT_TOKENS_MAX: Final = 8


class Detokenizer:
    """One output's text, token by token. `push`es and the `flush` together are its decoded text."""

    __slots__ = ("_alone", "_codec", "_ids", "_known", "_known_text", "_skip_special")

    def __init__(
        self,
        codec: Codec,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool,
        alone: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        """`alone`: a token's text, if it has one that no other token can change."""
        self._codec = codec
        self._alone = alone
        self._skip_special = skip_special_tokens
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        """The window: tokens whose text is known, then the pending ones."""
        self._known = len(self._ids)
        self._known_text: str | None = None
        """Decoded when it is needed."""

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; often the token's own, "" while a character is open."""
        if self._known == len(self._ids) and (plain := self._alone(token_id)) is not None:
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
        """The text still held back, unfinished bytes as replacement characters. The end."""
        if self._known == len(self._ids):
            return ""
        return self._settle(self._decode(self._ids), len(self._ids))

    def _settle(self, text: str, upto: int) -> str:
        """Give out what `text`, the decoded first `upto` tokens of the window, adds; move the window."""
        known = self._known_text
        if known is None:
            known = self._known_text = self._decode(self._ids[: self._known])
        added = text[len(known) :]
        if not text.startswith(
            known
        ):  # later bytes changed how earlier ones decode; what was given out stands
            added = self._decode(self._ids[self._known : upto])
        if added:
            del self._ids[: self._known]
            self._known = upto - self._known
            self._known_text = None
        elif upto - self._known >= PENDING_TOKENS_MAX:
            del self._ids[self._known : upto]  # tokens without text
        return added

    def _clean_cut(self, text: str) -> int:
        """The last place to cut the window without cutting a character; its end if there is none."""
        end = len(self._ids)
        for cut in range(end - 1, max(end - CUT_TOKENS_MAX, self._known), -1):
            if self._decode(self._ids[:cut]) + self._decode(self._ids[cut:]) == text:
                return cut
        return end

    def _decode(self, ids: Sequence[int]) -> str:
        return self._codec.decode(ids, skip_special_tokens=self._skip_special)
