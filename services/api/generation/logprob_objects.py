"""Types of log-probabilities in answers."""

from typing_extensions import TypedDict


class AlternativeLogprob(TypedDict):
    token: str
    logprob: float | None
    bytes: list[int]


class ChosenLogprob(AlternativeLogprob):
    top_logprobs: list[AlternativeLogprob]


class ContentLogprobs(TypedDict):
    content: list[ChosenLogprob]


class ChatLogprobs(ContentLogprobs):
    refusal: None


class CompletionLogprobs(TypedDict):
    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Alternatives of each token of the prompt, by their ids. None for the first token."""
