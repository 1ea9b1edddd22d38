"""Log-probabilities in the formats of OpenAI's APIs and of vLLM."""

from collections.abc import Callable, Sequence
from typing import Final

from baton.api.generation.logprob_objects import (
    AlternativeLogprob,
    ChatLogprobs,
    ChosenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
)
from baton.api.generation.prompt_echo import PromptEcho
from baton.api.text.tokenizer import Tokenizer
from baton.rooms.request import Token

TokenText = Callable[[int], str]
"""Makes the text that a token is shown as."""
LOGPROB_MIN: Final = -9999.0
"""Log-probability shown for an impossible token: JSON has no infinity."""


def chat_logprobs(tokens: Sequence[Token], tokenizer: Tokenizer, text: TokenText) -> ChatLogprobs:
    """Return `logprobs` of a chat choice. `bytes` are for tokens that hold a part of a character."""
    content: list[ChosenLogprob] = [
        {
            **_entry(token.id, token.logprob, tokenizer, text),
            "top_logprobs": [_entry(id_, logprob, tokenizer, text) for id_, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[Token], offsets: Sequence[int], text: TokenText
) -> CompletionLogprobs:
    """Return `logprobs` of a completion choice. `top_logprobs` always has the chosen token, as OpenAI's
    does. It is null for a token without a log-probability: a prompt's first."""
    return {
        "text_offset": list(offsets),
        "tokens": [text(token.id) for token in tokens],
        "token_logprobs": [_shown(token.logprob) for token in tokens],
        "top_logprobs": [None if token.logprob is None else _by_text(token, text) for token in tokens],
    }


def _by_text(token: Token, text: TokenText) -> dict[str, float]:
    """Return log-probabilities by text. Of two tokens with the same text the likelier one counts: else a
    token that was not the likeliest would look as if it was."""
    shown: dict[str, float] = {}
    for id_, logprob in (*token.top, (token.id, token.logprob or 0.0)):
        name, value = text(id_), max(logprob, LOGPROB_MIN)
        shown[name] = max(shown.get(name, value), value)
    return shown


def token_text(id_: int, tokenizer: Tokenizer, *, by_id: bool = False) -> str:
    """Return a token as text, or `by_id`. Bytes that form no character are written as `\xf0`, so that two
    tokens of such bytes stay distinct."""
    if by_id:
        return f"token_id:{id_}"
    return tokenizer.token_bytes(id_).decode(errors="backslashreplace")


def _entry(id_: int, logprob: float | None, tokenizer: Tokenizer, text: TokenText) -> AlternativeLogprob:
    return {
        "token": text(id_),
        "logprob": _shown(logprob),
        "bytes": list(tokenizer.token_bytes(id_)),
    }


def _shown(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOGPROB_MIN)


def prompt_tokens(echo: PromptEcho, top: int) -> list[Token]:
    """Return the prompt's tokens as if they had been drawn, with `top` alternatives each."""
    scores = zip(echo.prompt[1:], echo.scores, strict=True)
    scored = [Token(token, score.logprob, score.top[:top]) for token, score in scores]
    return [*map(Token, echo.prompt[:1]), *scored]


def shown_scores(echo: PromptEcho, top: int, text: TokenText) -> PromptLogprobs:
    """Return `prompt_logprobs` in vLLM's format: for each token of the prompt, itself and `top`
    alternatives, by their ids. None for the first token."""
    shown: PromptLogprobs = [None]
    for token, score in zip(echo.prompt[1:], echo.scores, strict=True):
        entries = {str(token): _score(token, score.logprob, score.rank, text)}
        for rank, (each, logprob) in enumerate(score.top[:top], 1):
            if each != token:
                entries[str(each)] = _score(each, logprob, rank, text)
        shown.append(entries)
    return shown


def _score(token: int, logprob: float, rank: int, text: TokenText) -> PromptLogprob:
    return {"logprob": max(logprob, LOGPROB_MIN), "rank": rank, "decoded_token": text(token)}
