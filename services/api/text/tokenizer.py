"""A model's tokenizer and chat template, in a process that never loads torch.

The transformers library does the work. If torch is installed, importing transformers also imports torch. That
costs seconds and hundreds of megabytes, in a process that holds no tensor. `keep_torch_out` prevents it. The
bootstrap process calls it before everything else.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from baton.api.text.byte_alphabet import byte_letters
from baton.api.text.chat_template import ChatTemplate
from baton.api.text.detokenizer import Codec
from baton.api.text.token_bound import TokenBound
from baton.models.model_facts import json_object
from baton.models.tokenizer_files import reference_tokenizer

WHOLE_BYTES_MAX: Final = 128 * 2**10
"""Size in bytes up to which any text is tokenised in one piece, which takes tens of megabytes at most."""
PIECE_CHARS: Final = 32 * 2**10
"""Length in characters of the pieces in which the tokens of a longer text are first counted."""
WHOLE_TOKEN_BYTES: Final = 6
"""Bytes of text per allowed token. A text of up to this size for its limit is tokenised at once, without a
first count in pieces."""
COUNT_MARGIN: Final = 2
"""Multiple of the allowed tokens above which the count in pieces refuses a text. Cutting a text changes its
count only near the cuts."""
BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>")
ADVISORY_SWITCH: Final = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


class TooManyTokens(Exception):
    """Error: a text has more tokens than the caller allows."""

    def __init__(self, tokens: int, *, counted_all: bool = True) -> None:
        """Create the error for a text of `tokens` tokens. `counted_all`: whether that is the exact number.
        Otherwise the text has more."""
        super().__init__(f"it has {tokens} tokens" if counted_all else f"it has more than {tokens} tokens")
        self.tokens = tokens
        self.counted_all = counted_all


def keep_torch_out() -> None:
    """Make every later `import torch` of this process fail, so that transformers works without it.

    The bootstrap process calls it before anything imports transformers. A process that also runs a worker
    never calls it. Raises RuntimeError if torch is loaded already.
    """
    if sys.modules.get("torch") is not None:
        raise RuntimeError("torch is loaded already: keep_torch_out has to come before every other import")
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault(ADVISORY_SWITCH, "1")


class Tokenizer:
    """A model's tokenizer and chat template. Immutable after construction, and safe to use from several
    threads."""

    def __init__(self, reference: Any) -> None:
        """Wrap a transformers tokenizer, `reference`, which has a `tokenizers` backend."""
        self.chat: Final = ChatTemplate(reference)
        """The model's chat template, which makes a prompt from a conversation."""
        self._backend = reference.backend_tokenizer
        self.codec: Final[Codec] = self._backend
        """The underlying `tokenizers.Tokenizer`, for incremental decoding."""
        self._backend.no_truncation()
        self._backend.no_padding()
        self._floor = TokenBound(self._backend)
        self._added: dict[int, str] = {
            id_: token.content for id_, token in reference.added_tokens_decoder.items()
        }
        self._longest_added = max([0, *(len(each.encode()) for each in self._added.values())])
        self._added_ids = {text: id_ for id_, text in self._added.items()}
        self._special = {
            id_: token.content for id_, token in reference.added_tokens_decoder.items() if token.special
        }
        self._info = _info(reference)
        self._response_template = getattr(reference, "response_template", None)
        self._byte_of = byte_letters() if _is_byte_level(self._backend) else None
        self._bytes: dict[int, bytes] = {}
        self._by_bytes_alone = _decoders(self._backend) == ["ByteLevel"]
        """Whether the tokenizer decodes tokens by joining their bytes, and does nothing else to the text."""
        self.whole_texts: Mapping[int, str | None] = _WholeTexts(self._whole_text)
        """Text of each token, by id, if it is whole characters that no other token can change. Otherwise
        None."""

    def least_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of a text. It is computed from the text's length,
        which costs nearly nothing."""
        return self._floor.least(text)

    @property
    def floor(self) -> TokenBound:
        """Lower bound on the number of tokens of a text. It is computed from the text's length."""
        return self._floor

    def encode(self, text: str, *, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Return the token ids of `text`. The spelling of a special token within the text becomes that token.

        Raises TooManyTokens for more than `most` tokens.
        """
        if most is not None:
            self._count_in_pieces(text, most)
        # The fast form omits each token's offset in the text, a quarter of the work.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        count = len(encoded)
        if most is not None and count > most:
            del encoded  # the error keeps its frames' objects: hundreds of bytes per token
            raise TooManyTokens(count)
        ids: list[int] = encoded.ids
        return ids

    def _count_in_pieces(self, text: str, most: int) -> None:
        """Raise TooManyTokens for a long text that has far more tokens than `most`, with the memory of one
        piece.

        Tokenising takes hundreds of bytes of memory per token, or about 70 per byte of text if tokens are
        few.
        """
        limit = COUNT_MARGIN * most
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if size <= max(WHOLE_BYTES_MAX, WHOLE_TOKEN_BYTES * most):
            return
        cut = 2 * self._longest_added  # an added token that is cut becomes several tokens, at both ends
        step, count = max(PIECE_CHARS, 8 * cut), 0
        for start in range(0, len(text), step):
            piece = text[start : start + step]
            (encoded,) = self._backend.encode_batch_fast([piece], add_special_tokens=False)
            count += max(0, len(encoded) - cut)
            if count > limit:
                raise TooManyTokens(most, counted_all=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the token ids, exactly as the model wrote it, without clean-up of spaces."""
        return self.codec.decode(ids, skip_special_tokens=skip_special_tokens)

    @property
    def response_template(self) -> Any:
        """Response template, by which the transformers library parses the model's answers. None if the model
        has none."""
        return self._response_template

    @property
    def info(self) -> dict[str, Any]:
        """The tokenizer's configuration as JSON, without file names."""
        return self._info

    @property
    def added(self) -> Mapping[str, int]:
        """Ids of the tokens that were added to the trained vocabulary (such as `<tool_call>`), by the token's
        text."""
        return self._added_ids

    @property
    def special(self) -> Mapping[int, str]:
        """Texts of the special tokens, by id. By default they are left out of decoded text."""
        return self._special

    def check_chat(self) -> None:
        """Raise ChatTemplateFailed if the chat template does not compile."""
        self.chat.check()

    def beyond(self, vocabulary: int) -> list[str]:
        """Return the spellings of the tokenizer's tokens with ids from `vocabulary` on, ordered by id. The
        model has no embedding for them."""
        ids = {*range(vocabulary, self._backend.get_vocab_size()), *(id_ for id_ in self._added)}
        pieces = (self._added.get(id_) or self.piece(id_) for id_ in sorted(ids) if id_ >= vocabulary)
        return [piece for piece in pieces if piece]

    def token_bytes(self, id_: int) -> bytes:
        """Return the bytes of one token; b"" for an unknown id. The bytes of consecutive tokens join to their
        text."""
        known = self._bytes.get(id_)
        if known is None:
            known = self._bytes[id_] = self._bytes_of(id_)  # at most one entry per vocabulary entry
        return known

    def piece(self, id_: int) -> str:
        """Return a token as the vocabulary spells it; "" for an unknown id."""
        return self._backend.id_to_token(id_) or ""

    def _whole_text(self, id_: int) -> str | None:
        if not self._by_bytes_alone or self._byte_of is None or id_ in self._added:
            return None
        if any(char not in self._byte_of for char in self.piece(id_)):
            return None
        try:
            text = self.token_bytes(id_).decode()
        except UnicodeDecodeError:
            return None
        return text if text and "\ufffd" not in text else None

    def _bytes_of(self, id_: int) -> bytes:
        if (added := self._added.get(id_)) is not None:
            return added.encode()
        piece = self.piece(id_)
        if self._byte_of is not None:
            return bytes(self._byte_of[char] for char in piece if char in self._byte_of)
        if fallback := BYTE_PIECE.fullmatch(piece):
            return bytes((int(fallback[1], 16),))
        return piece.replace("▁", " ").encode()


class _WholeTexts(dict[int, str | None]):
    """Map from token id to text that computes each entry when it is first read. It has at most one entry per
    token."""

    def __init__(self, text_of: Callable[[int], str | None]) -> None:
        super().__init__()
        self._text_of = text_of

    def __missing__(self, id_: int) -> str | None:
        text = self[id_] = self._text_of(id_)
        return text


PROCESSOR_TEMPLATE: Final = "chat_template.json"
"""Name of the file in which multimodal models may store their chat template."""


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Return the tokenizer and chat template of a safetensors model directory.

    Imports no torch after `keep_torch_out`. Raises TokenizerUnusable and ModelUnreadable.
    """
    reference = reference_tokenizer(model_dir)
    beside = json_object(model_dir / PROCESSOR_TEMPLATE).get("chat_template")
    if reference.chat_template is None and isinstance(beside, str):
        reference.chat_template = beside
    return Tokenizer(reference)


def _info(reference: Any) -> dict[str, Any]:
    told = {name: value for name, value in reference.init_kwargs.items() if not _is_a_path(name)}
    told |= reference.special_tokens_map
    told |= {"tokenizer_class": type(reference).__name__, "chat_template": reference.chat_template}
    info: dict[str, Any] = json.loads(json.dumps(told, default=str))
    return info


def _is_a_path(name: str) -> bool:
    return name.endswith(("_file", "_files", "name_or_path", "_path")) or name == "tokenizer_object"


def _is_byte_level(backend: Any) -> bool:
    return "ByteLevel" in _decoders(backend)


def _decoders(backend: Any) -> list[str]:
    """Return the types of the decoder steps of a tokenizer, such as `ByteLevel`, in order."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]
