"""Rendering of log-probabilities in the response formats of OpenAI's APIs and of vLLM."""

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
"""Function that takes a token id and returns the text by which a response shows the token."""
LOGPROB_MIN: Final = -9999.0
"""Lowest log-probability in a response. It stands for the minus infinity of an impossible token, which JSON
cannot hold."""


def chat_logprobs(tokens: Sequence[Token], tokenizer: Tokenizer, text: TokenText) -> ChatLogprobs:
    """Return the field `logprobs` of a chat choice. It has the `bytes` of each token, because a token may
    hold only a part of a character."""
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
    """Return the field `logprobs` of a completion choice. `offsets`: for each token, the number of characters
    of text before it.

    As in OpenAI's API, `top_logprobs` always includes the chosen token. It is null for the first token of an
    echoed prompt, which has no log-probability.
    """
    return {
        "text_offset": list(offsets),
        "tokens": [text(token.id) for token in tokens],
        "token_logprobs": [_shown(token.logprob) for token in tokens],
        "top_logprobs": [None if token.logprob is None else _by_text(token, text) for token in tokens],
    }


def _by_text(token: Token, text: TokenText) -> dict[str, float]:
    """Return the log-probabilities of a token and its alternatives, by token text. If two tokens have the
    same text, the higher log-probability is returned. Otherwise a less likely token could appear as the most
    likely one."""
    shown: dict[str, float] = {}
    for id_, logprob in (*token.top, (token.id, token.logprob or 0.0)):
        name, value = text(id_), max(logprob, LOGPROB_MIN)
        shown[name] = max(shown.get(name, value), value)
    return shown


def token_text(id_: int, tokenizer: Tokenizer, *, by_id: bool = False) -> str:
    r"""Return the text by which a response shows a token. Bytes that are no whole character are escaped as in
    `\xf0`, so that different tokens have different texts. With `by_id`, return `token_id:ID`."""
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
    """Return the tokens of an echoed prompt in the form of output tokens, with their log-probabilities.
    `top`: number of alternatives of each token. The first token has no log-probability."""
    scores = zip(echo.prompt[1:], echo.scores, strict=True)
    scored = [Token(token, score.logprob, score.top[:top]) for token, score in scores]
    return [*map(Token, echo.prompt[:1]), *scored]


def shown_scores(echo: PromptEcho, top: int, text: TokenText) -> PromptLogprobs:
    """Return the field `prompt_logprobs` in vLLM's format. For each token of the prompt, it has the
    log-probabilities of the token and of `top` alternatives, by token id. It has None for the first token."""
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
