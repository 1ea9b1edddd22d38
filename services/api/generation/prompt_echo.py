"""What of its prompt is an answer told with: its text before the answer's, how likely its tokens are?

`echo` and `prompt_logprobs`, as in vLLM. A prompt's tokens are scored where either wants log-probabilities of
them; the choices of one prompt share what is told of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from baton.api.errors import ApiError, invalid
from baton.api.generation.logprobs import LOGPROB_MIN, TokenText
from baton.api.requests.schemas import ChatRequest, CompletionRequest, GenerationRequest
from baton.api.text.detokenizer import Detokenizer
from baton.api.text.tokenizer import Tokenizer
from baton.rooms.request import SCORES_MAX, Score, Token

ALL: Final = -1
"""Of the likeliest tokens."""


@dataclass(slots=True)
class PromptEcho:
    """Of the answers to one prompt."""

    prompt: Sequence[int]
    text: str | None = None
    """That comes before an answer's; None: none does."""
    offsets: Sequence[int] = ()
    """Of each of the prompt's tokens: how many characters of the text came before it."""
    alone: bool = False
    """Nothing of an answer comes behind it."""
    scores: Sequence[Score] = ()
    """Of the prompt's tokens but the first, once they are told; none where they are not scored."""

    @property
    def entries(self) -> int:
        """Log-probabilities that are told of it."""
        return len(self.scores) * (1 + len(self.scores[0].top)) if self.scores else 0


def scored(body: GenerationRequest) -> tuple[int | None, str]:
    """With how many of the likeliest the prompt's tokens are scored, or None, and the field that asks for it.
    Raises ApiError where fields contradict each other."""
    if body.prompt_logprobs is not None and body.stream:
        why = "'prompt_logprobs' is not served with 'stream'."
        raise invalid("prompt_logprobs", why, "unsupported_value")
    echoed = body.logprobs if isinstance(body, CompletionRequest) and body.echo else None
    asked = [each for each in (body.prompt_logprobs, echoed) if each is not None]
    if not asked:
        return None, ""
    param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    return (ALL if ALL in asked else max(asked)), param


def alternatives(asked: int, param: str, vocabulary: int, most: int) -> int:
    """How many of the likeliest tokens are told of each. `most`: of a request, ALL for any number. Raises
    ApiError."""
    told = vocabulary if asked == ALL else asked
    if most != ALL and told > most:
        all_of = f", all {vocabulary} tokens" if asked == ALL else ""
        why = f"'{param}' is {asked}{all_of}; at most {most} are told here (--max-logprobs)."
        raise invalid(param, why)
    return min(told, vocabulary)


def check_scores(prompts: Sequence[Sequence[int]], answers: int, top: int, param: str) -> None:
    """Raise ApiError for more log-probabilities than are told of one request's prompts, with each of the
    `answers` to one."""
    count = sum(map(len, prompts)) * answers * (1 + top)
    if count > SCORES_MAX:
        raise _too_many(param, count)


def _too_many(param: str, count: int) -> ApiError:
    why = f"'{param}' asks for {count} log-probabilities of the prompt; at most {SCORES_MAX} are told."
    return invalid(param, why)


def prompt_echo_of(
    body: GenerationRequest, prompt: Sequence[int], given: str | list[int] | None, tokenizer: Tokenizer
) -> PromptEcho | None:
    """`given`: the prompt as it was sent, where it was not shortened. None where nothing is told of it."""
    if isinstance(body, ChatRequest):
        text = _last_said(body) if body.echo else None
        return None if text is None and body.prompt_logprobs is None else PromptEcho(prompt, text)
    if not isinstance(body, CompletionRequest) or not body.echo:
        return None if body.prompt_logprobs is None else PromptEcho(prompt)
    as_text = isinstance(given, str)
    detokenizer = Detokenizer(tokenizer.codec, (), skip_special_tokens=as_text, alone=tokenizer.alone)
    texts, offsets, chars = [], [], 0
    for token in prompt:
        offsets.append(chars)
        texts.append(detokenizer.push(token))
        chars += len(texts[-1])
    text = given if isinstance(given, str) else "".join([*texts, detokenizer.flush()])
    return PromptEcho(prompt, text, [min(each, len(text)) for each in offsets], alone=body.max_tokens == 0)


def _last_said(body: ChatRequest) -> str | None:
    """By the assistant, if the last message is its."""
    last = body.messages[-1]
    return "".join(last.content or ()) if last.role == "assistant" else None


def prompt_tokens(beginning: PromptEcho, top: int) -> list[Token]:
    """The prompt's, as if they had been drawn, with `top` of the likeliest in the place of each."""
    scores = zip(beginning.prompt[1:], beginning.scores, strict=True)
    told = [Token(token, score.logprob, score.top[:top]) for token, score in scores]
    return [*map(Token, beginning.prompt[:1]), *told]


def shown_scores(beginning: PromptEcho, top: int, text: TokenText) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`, as vLLM shows it: of each token, by their ids, itself and `top` of the likeliest in
    its place."""
    told: list[dict[str, Any] | None] = [None]
    for token, score in zip(beginning.prompt[1:], beginning.scores, strict=True):
        entries = {str(token): _entry(token, score.logprob, score.rank, text)}
        for rank, (each, logprob) in enumerate(score.top[:top], 1):
            if each != token:
                entries[str(each)] = _entry(each, logprob, rank, text)
        told.append(entries)
    return told


def asked_top(body: ChatRequest | CompletionRequest, vocabulary: int) -> int | None:
    """Of `prompt_logprobs`."""
    return vocabulary if body.prompt_logprobs == ALL else body.prompt_logprobs


def _entry(token: int, logprob: float, rank: int, text: TokenText) -> dict[str, Any]:
    return {"logprob": max(logprob, LOGPROB_MIN), "rank": rank, "decoded_token": text(token)}
