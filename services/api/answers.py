"""Shapes of answers, for `/openapi.json`. The renderings make the answers.

`tests/api/http/test_openapi_document.py` checks real answers against these shapes, field by field.
"""

from typing import Any, Literal

from pydantic import BaseModel, RootModel


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    """Path of the field at fault, such as `messages[1].role`."""
    code: str | None


class ErrorAnswer(BaseModel):
    error: Error


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    reasoning_tokens: int


class TokenUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None
    reasoning_tokens: int | None = None
    """The same as in the details."""


Finish = Literal["stop", "length", "tool_calls"]


class AlternativeLogprob(BaseModel):
    token: str
    logprob: float | None
    bytes: list[int]


class ChosenLogprob(AlternativeLogprob):
    top_logprobs: list[AlternativeLogprob]


PromptLogprobs = list[dict[str, Any] | None]
"""Alternatives of each token of the prompt, by their ids. None for the first token."""


class ChatLogprobs(BaseModel):
    content: list[ChosenLogprob] | None
    refusal: None


class CompletionLogprobs(BaseModel):
    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]


class MadeFunction(BaseModel):
    name: str
    arguments: str
    """JSON text."""


class MadeCall(BaseModel):
    id: str
    type: Literal["function"]
    function: MadeFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[MadeCall] | None = None


class AnswerHead(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: int | str | None
    matched_stop: int | str | None
    token_ids: list[int] | None = None


class ChatAnswer(AnswerHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class GrowingFunction(BaseModel):
    name: str | None = None
    arguments: str
    """More of the arguments. All of a call join to JSON text."""


class GrowingCall(BaseModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: GrowingFunction


class GrowingMessage(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[GrowingCall] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: GrowingMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(AnswerHead):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: TokenUsage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    matched_stop: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionAnswer(AnswerHead):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage


class CompletionChunk(AnswerHead):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    default_sampling_params: dict[str, Any]
    quantize: str | None
    """Format in which workers hold the weights. Null while no worker is known."""
    engine: str | None
    """Engine that computes. This and the next two are null while no worker is known."""
    dtype: str | None
    """Number format of keys and values."""
    batch_invariant: bool | None
    """Whether tokens depend neither on what is computed together nor on how prompts are divided."""
    type: Literal["model"]
    """This field and the next ones are Anthropic's."""
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: str


class ModelCards(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: bool
    first_id: str
    last_id: str


class TokensOfText(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TextOfTokens(BaseModel):
    prompt: str


class Release(BaseModel):
    version: str


class MessagesCode(BaseModel):
    error_code: str


class MessagesFault(BaseModel):
    type: str
    message: str
    details: MessagesCode | None = None


class MessagesError(BaseModel):
    """An error in Anthropic's format."""

    type: Literal["error"]
    error: MessagesFault
    request_id: str


class ThinkingTokens(BaseModel):
    thinking_tokens: int


class MessagesUsage(BaseModel):
    input_tokens: int
    """Tokens that were computed. Cached ones are `cache_read_input_tokens`."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | None = None


class TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class MessageEnd(BaseModel):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessagesAnswer(MessageEnd):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    usage: MessagesUsage


class MessageStart(BaseModel):
    type: Literal["message_start"]
    message: MessagesAnswer


class Ping(BaseModel):
    type: Literal["ping"]


class BlockStart(BaseModel):
    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextDelta(BaseModel):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(BaseModel):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(BaseModel):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(BaseModel):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(BaseModel):
    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(BaseModel):
    type: Literal["content_block_stop"]
    index: int


class MessageDelta(BaseModel):
    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessagesUsage


class MessageStop(BaseModel):
    type: Literal["message_stop"]


class MessagesEvent(
    RootModel[
        MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessagesError
    ]
):
    """An event of Anthropic's API. Its name is its `type`."""


class TokenCount(BaseModel):
    object: Literal["response.input_tokens"] | None = None
    """Only in the Responses API."""
    input_tokens: int
