"""Types of the JSON objects that hold log-probabilities in responses."""

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
"""For each token of the prompt: log-probabilities of the token and its alternatives, by token id as a string.
None for the first token. The format is vLLM's."""
