"""How are log-probabilities shown in the two APIs' shapes?"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from baton.api.text.tokenizer import Tokenizer
from baton.rooms.request import Token

TokenText = Callable[[int], str]
"""As what a token is shown."""
LOGPROB_MIN: Final = -9999.0
"""Shown for an impossible token: JSON knows no infinity."""


def chat_logprobs(tokens: Sequence[Token], tokenizer: Tokenizer, text: TokenText) -> dict[str, Any]:
    """`logprobs` of a chat choice; `bytes` is what to join where a token holds part of a character."""
    content = [
        {
            **_entry(token.id, token.logprob, tokenizer, text),
            "top_logprobs": [_entry(id_, logprob, tokenizer, text) for id_, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[Token], offsets: Sequence[int], text: TokenText) -> dict[str, Any]:
    """`logprobs` of a completion choice. `top_logprobs` always has the chosen token, as OpenAI's does, and is
    null of one that has no log-probability: a prompt's first."""
    return {
        "text_offset": list(offsets),
        "tokens": [text(token.id) for token in tokens],
        "token_logprobs": [_shown(token.logprob) for token in tokens],
        "top_logprobs": [None if token.logprob is None else _by_text(token, text) for token in tokens],
    }


def _by_text(token: Token, text: TokenText) -> dict[str, float]:
    """Of two tokens that are the same text the likelier one is told: else one that was not the likeliest
    would look as if it was."""
    told: dict[str, float] = {}
    for id_, logprob in (*token.top, (token.id, token.logprob or 0.0)):
        name, shown = text(id_), max(logprob, LOGPROB_MIN)
        told[name] = max(told.get(name, shown), shown)
    return told


def token_text(id_: int, tokenizer: Tokenizer, *, by_id: bool = False) -> str:
    """A token as text, or `by_id`; bytes that form no character are written as `\\xf0`, so that two tokens of
    such bytes stay distinct."""
    if by_id:
        return f"token_id:{id_}"
    return tokenizer.token_bytes(id_).decode(errors="backslashreplace")


def _entry(id_: int, logprob: float | None, tokenizer: Tokenizer, text: TokenText) -> dict[str, Any]:
    return {
        "token": text(id_),
        "logprob": _shown(logprob),
        "bytes": list(tokenizer.token_bytes(id_)),
    }


def _shown(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOGPROB_MIN)
