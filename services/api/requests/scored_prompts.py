"""Log-probabilities of prompts: whether a request asks for them, and how many."""

from collections.abc import Sequence
from typing import Final

from baton.api.errors import invalid
from baton.api.requests.schemas import CompletionRequest, GenerationRequest
from baton.rooms.request import SCORES_MAX

ALL: Final = -1
"""All tokens of the vocabulary as alternatives."""


def scored(body: GenerationRequest) -> tuple[int | None, str]:
    """Return the alternatives for each token of the prompt, or None, and the field that asks for them.

    Raises ApiError for fields that contradict each other.
    """
    if body.prompt_logprobs is not None and body.stream:
        why = "'prompt_logprobs' is not served with 'stream'."
        raise invalid("prompt_logprobs", why, "unsupported_value")
    echoed = body.logprobs if isinstance(body, CompletionRequest) and body.echo else None
    tops = [each for each in (body.prompt_logprobs, echoed) if each is not None]
    if not tops:
        return None, ""
    param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    return (ALL if ALL in tops else max(tops)), param


def alternatives(top: int, param: str, vocabulary: int, most: int) -> int:
    """Return the alternatives of each token, for ALL the vocabulary's size. `most`: the deployment's bound,
    or ALL. Raises ApiError."""
    shown = vocabulary if top == ALL else top
    if most != ALL and shown > most:
        all_of = f", all {vocabulary} tokens" if top == ALL else ""
        raise invalid(param, f"'{param}' is {top}{all_of}; at most {most} are told here (--max-logprobs).")
    return min(shown, vocabulary)


def check_scores(prompts: Sequence[Sequence[int]], choices: int, top: int, param: str) -> None:
    """Raise ApiError if all choices together would show too many log-probabilities of the prompts."""
    count = sum(map(len, prompts)) * choices * (1 + top)
    if count > SCORES_MAX:
        why = f"'{param}' asks for {count} log-probabilities of the prompt; at most {SCORES_MAX} are told."
        raise invalid(param, why)
