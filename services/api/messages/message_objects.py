"""Types of the answers of Anthropic's Messages API, and of the events that build them."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypeAliasType, TypedDict

from baton.api.messages.anthropic_errors import MessagesError


class ThinkingTokens(TypedDict):
    thinking_tokens: int


class MessagesUsage(TypedDict):
    input_tokens: int
    """Number of prompt tokens that were computed. Tokens from the cache are in `cache_read_input_tokens`."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[ThinkingTokens]


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class MessageHead(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str


class MessageEnd(TypedDict):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessagesAnswer(MessageHead, MessageEnd):
    content: list[Block]
    usage: MessagesUsage


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: MessagesAnswer


class Ping(TypedDict):
    type: Literal["ping"]


class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


AnyDelta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: AnyDelta


class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessagesUsage


class MessageStop(TypedDict):
    type: Literal["message_stop"]


MessagesEvent = TypeAliasType(
    "MessagesEvent",
    Annotated[
        MessageStart
        | Ping
        | BlockStart
        | BlockDelta
        | BlockStop
        | MessageDelta
        | MessageStop
        | MessagesError,
        Field(description="An event of Anthropic's API. Its name is its `type`."),
    ],
)


class TokenCount(TypedDict):
    input_tokens: int
