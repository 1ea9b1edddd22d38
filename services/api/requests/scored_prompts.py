"""Checks of requests for log-probabilities of prompt tokens: whether they are asked for, and how many."""

from collections.abc import Sequence
from typing import Final

from baton.api.errors import invalid
from baton.api.requests.schemas import CompletionRequest, GenerationRequest
from baton.rooms.request import SCORES_MAX

ALL: Final = -1
"""Value of a field that asks for alternative tokens, if it asks for all tokens of the vocabulary."""


def scored(body: GenerationRequest) -> tuple[int | None, str]:
    """Return the number of alternatives to report for each prompt token, and the field that asks for them.
    None: no field does.

    Raises ApiError if fields contradict each other.
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
    """Return the number of alternative tokens to report for each token, after checking it. ALL becomes the
    vocabulary's size. `most`: limit of the deployment, or ALL. Raises ApiError."""
    shown = vocabulary if top == ALL else top
    if most != ALL and shown > most:
        all_of = f", all {vocabulary} tokens" if top == ALL else ""
        raise invalid(param, f"'{param}' is {top}{all_of}; at most {most} are told here (--max-logprobs).")
    return min(shown, vocabulary)


def check_scores(prompts: Sequence[Sequence[int]], choices: int, top: int, param: str) -> None:
    """Raise ApiError if the choices together would return too many log-probabilities of prompt tokens."""
    count = sum(map(len, prompts)) * choices * (1 + top)
    if count > SCORES_MAX:
        why = f"'{param}' asks for {count} log-probabilities of the prompt; at most {SCORES_MAX} are told."
        raise invalid(param, why)
