"""Schemas of requests of Anthropic's Messages API: fields, and the values that each may have by itself.

The schema of a content block depends on its `type`. A list of blocks is therefore validated block by block,
so that an error has the path of its block.
"""

from collections.abc import Mapping
from functools import partial, reduce
from operator import or_
from types import GenericAlias
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    FailFast,
    Field,
    PlainValidator,
    StringConstraints,
    TypeAdapter,
    model_validator,
)
from pydantic_core import PydanticCustomError

from baton.api.requests.call_arguments import arguments_object
from baton.api.requests.field_types import (
    CALL_ID_CHARS_MAX,
    MESSAGES_MAX,
    STOP_STRINGS_MAX,
    TOOLS_MAX,
    Effort,
    Nothing,
    StopString,
    Whole,
    Words,
    call_arguments,
    function_name,
)
from baton.api.requests.message_history import TEXT_PARTS, is_foreign, text_part, without_envelope
from baton.api.requests.schemas import JsonSchema, Message, Sampled, Shape, read_message, reasoning_of
from baton.api.requests.unsupported_fields import UnsupportedFields

BUDGET_TOKENS_LEAST: Final = 1024
"""Smallest `budget_tokens` of reasoning that Anthropic allows, in tokens."""
BLOCKS_MAX: Final = 4096
"""Most content blocks of one message."""
ELSEWHERE: Final = frozenset(
    {"image", "document", "search_result", "container_upload", "server_tool_use", "tool_reference"}
    | {"mcp_tool_use", "mcp_tool_result", "web_search_tool_result", "web_fetch_tool_result"}
    | {"code_execution_tool_result", "bash_code_execution_tool_result", "tool_search_tool_result"}
    | {"text_editor_code_execution_tool_result", "compaction"}
)
"""Types of Anthropic's content blocks that are not supported. A request with one of them is refused."""
MESSAGES_UNSUPPORTED: Final = UnsupportedFields(
    ignored=frozenset(
        {"anthropic_beta", "anthropic_version", "betas", "cache_control", "context_management"}
        | {"diagnostics", "metadata", "service_tier", "user_profile_id", "workspace_id"}
    ),
    harmless={
        "container": (),
        "fallbacks": ([],),
        "inference_geo": ("global",),
        "mcp_servers": ([],),
        "speed": ("standard",),
    },
    known={
        "": frozenset(
            {"billing_policy", "compaction", "fallback_credit_token", "logprobs", "max_completion_tokens"}
            | {"max_tokens_to_sample", "n", "prompt", "reasoning_effort", "response_format", "top_logprobs"}
        ),
        "output_config": frozenset({"task_budget"}),
        "tools.[]": frozenset({"function", "parameters"}),
    },
    instead={
        "max_completion_tokens": "max_tokens",
        "max_tokens_to_sample": "max_tokens",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
    },
)
"""Fields of the Messages API that are ignored or refused. Ignored fields concern the platform: where a prompt
is cached, who pays, and what a server may cut from a long conversation."""

CacheControl = Annotated[dict[str, Any] | None, Field()]
"""Type of the field `cache_control`. It is ignored, because every prompt is cached by its prefix anyway."""
CallId = Annotated[str, StringConstraints(min_length=1, max_length=CALL_ID_CHARS_MAX)]


class TextBlockParam(Shape):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: list[Any] | None = None
    """Citations in an earlier answer. They are ignored, because the answer's text says the same."""


class ThinkingBlockParam(Shape):
    """A content block with the assistant's reasoning from an earlier turn, in Anthropic's form."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinking(Shape):
    """A content block of encrypted reasoning that only Anthropic's servers can read. It is left out of the
    prompt."""

    type: Literal["redacted_thinking"]
    data: str = ""


def _input(value: Any) -> Any:
    return arguments_object(call_arguments(value)) if isinstance(value, str) else value


class ToolUse(Shape):
    """A content block with a tool call of the assistant, in Anthropic's form."""

    type: Literal["tool_use"]
    id: CallId
    name: Annotated[str, StringConstraints(min_length=1, max_length=CALL_ID_CHARS_MAX)]
    input: Annotated[dict[str, Any], BeforeValidator(_input, json_schema_input_type=dict[str, Any])]
    """Arguments of the tool call: an object, or the text of an incomplete JSON object from a stream that was
    cut off."""
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = None
    """Caller of the tool in Anthropic's API. Here it is always the model, and the field is ignored."""
    toolset_name: Nothing = None


def _kind(value: Any, kinds: Mapping[str, type[Shape]]) -> Any:
    """Return a content block, validated by the schema of its type. Raises PydanticCustomError."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise PydanticCustomError("content_type", "it has to be a block, which is an object with a type")
    kind = value["type"]
    if kind in TEXT_PARTS and kind not in kinds:
        kind, value = "text", {"type": "text", "text": text_part(value)}
    if kind in ELSEWHERE:
        raise PydanticCustomError("block", f"blocks of type '{kind}' are not supported, only texts are read")
    if kind not in kinds:
        raise PydanticCustomError("block", f"the type of a block has to be one of {', '.join(kinds)}")
    return kinds[kind].model_validate(value)


def _content(value: Any, blocks: TypeAdapter[Any]) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "it has to be a text or a list of blocks")
    return blocks.validate_python(value)


def _blocks(**kinds: type[Shape]) -> PlainValidator:
    """Return a pydantic validator for content that is a text or a list of content blocks. `kinds`: schema of
    each allowed block, by its `type`."""
    each = Annotated[Any, PlainValidator(partial(_kind, kinds=kinds))]
    listed = TypeAdapter(Annotated[list[each], FailFast(), Field(max_length=BLOCKS_MAX)])
    told: Any = GenericAlias(list, (reduce(or_, kinds.values()),))
    return PlainValidator(partial(_content, blocks=listed), json_schema_input_type=str | told)


Texts = Annotated[str | list[TextBlockParam], _blocks(text=TextBlockParam)]


class ToolResult(Shape):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Texts = ""
    is_error: bool = False
    cache_control: CacheControl = None
    toolset_name: Nothing = None


Block = TextBlockParam | ThinkingBlockParam | RedactedThinking | ToolUse | ToolResult
PART_KINDS: Final = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})


OTHER_ROLES: Final[Mapping[str, str]] = {"ctx": "system", "developer": "system", "msg": "user"}
"""Role that is meant, by the role that a client sends. Releases of Claude Code send `ctx` and `msg`. OpenAI's
name for `system` is `developer`."""


class MessageParam(Shape):
    """One message of a conversation. Consecutive messages of one role are one turn."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        """Return a message in Anthropic's form. It may be an answer of another API, sent back as history."""
        if not isinstance(value, dict):
            return value
        role = value.get("role")
        if isinstance(role, str) and role in OTHER_ROLES:
            value = {**value, "role": OTHER_ROLES[role]}
        if is_foreign(value, PART_KINDS):
            return _blocks_of(Message.model_validate(read_message(value)))
        return without_envelope(value, PARAM_FIELDS) if value.get("role") == "assistant" else value

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        str | list[Block],
        _blocks(
            text=TextBlockParam,
            thinking=ThinkingBlockParam,
            redacted_thinking=RedactedThinking,
            tool_use=ToolUse,
            tool_result=ToolResult,
        ),
    ]


PARAM_FIELDS: Final = frozenset(MessageParam.model_fields)


def _blocks_of(message: Message) -> dict[str, Any]:
    """Return a message of the chat format as a message of Anthropic's API, with its content as blocks."""
    texts = [message.content] if isinstance(message.content, str) else message.content or []
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    if message.role == "tool":
        result = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": blocks}
        return {"role": "user", "content": [result]}
    if thought := reasoning_of(message):
        blocks.insert(0, {"type": "thinking", "thinking": thought})
    for call in message.tool_calls:
        given = {"name": call.function.name, "input": call.function.arguments}
        blocks.append({"type": "tool_use", "id": call.id, **given})
    return {"role": message.role, "content": blocks}


def _few(value: Any, most: int, what: str) -> Any:
    if isinstance(value, list) and len(value) > most:
        raise PydanticCustomError("many", f"it holds {len(value)} {what}; at most {most} are taken")
    return value


def _own(value: Any) -> Any:
    """Return a tool unchanged, or refuse one of Anthropic's built-in tools before its fields are read."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise PydanticCustomError(
            "tool", f"'{kind[:64]}' is not supported; a tool has to be of type 'custom'"
        )
    return value


def _direct(value: Any) -> Any:
    if value not in ([], ["direct"]):
        raise PydanticCustomError("unsupported", "it is not supported")
    return value


def _no(value: bool) -> bool:
    if value:
        raise PydanticCustomError("unsupported", "it is not supported")
    return value


class ToolParam(Shape):
    """A tool that the model may call."""

    name: Annotated[str, AfterValidator(function_name)]
    input_schema: JsonSchema
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] = "custom"
    cache_control: CacheControl = None
    eager_input_streaming: bool | None = None
    """Whether arguments are streamed as they are written. The field is ignored, because they always are."""
    defer_loading: Annotated[bool, AfterValidator(_no)] = False
    allowed_callers: Annotated[list[str], AfterValidator(_direct)] = Field(default_factory=list)
    input_examples: Nothing = None


class ToolChoice(Shape):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Name of the tool that has to be called, if `type` is `tool`. Absent for other types of tool choice."""
    disable_parallel_tool_use: bool = False


class Thinking(Shape):
    """Option for whether the model reasons before it answers. The model itself decides for how long."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[Whole, Field(ge=BUDGET_TOKENS_LEAST)] | None = None
    display: Literal["summarized", "omitted"] = "summarized"


class OutputFormat(Shape):
    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(Shape):
    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(Shape):
    """Body of POST /v1/messages/count_tokens: all fields that determine the prompt."""

    unserved: ClassVar[UnsupportedFields] = MESSAGES_UNSUPPORTED

    model: str
    messages: Annotated[
        list[MessageParam],
        FailFast(),
        BeforeValidator(partial(_few, most=MESSAGES_MAX, what="messages")),
        Field(min_length=1),
    ]
    system: Texts = ""
    tools: Annotated[
        list[Annotated[ToolParam, BeforeValidator(_own)]],
        FailFast(),
        BeforeValidator(partial(_few, most=TOOLS_MAX, what="tools")),
    ] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Older name of the field `output_config.format`."""
    chat_template_kwargs: Words = Field(default_factory=dict)
    """Variables for the chat template. They are set in addition to those that the field `thinking` sets."""
    thread: dict[str, Any] | None = None
    """Reference to a conversation that Anthropic's server stores. It is refused, because none is stored here.
    """


class MessagesRequest(Sampled, CountRequest):
    """Body of POST /v1/messages. It also has the sampling fields that all APIs share."""

    max_tokens: Annotated[Whole, Field(ge=1)]
    stop_sequences: Annotated[list[StopString], FailFast(), Field(max_length=STOP_STRINGS_MAX)] = Field(
        default_factory=list
    )
    """Stop strings, under Anthropic's name for the field `stop`."""
    stream: bool = False
