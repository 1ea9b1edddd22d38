"""Schemas of Anthropic's API: fields, and the values that each may take by itself.

The schema of a block depends on its `type`. A list of blocks is therefore validated block by block, so that
errors have the path of the block.
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
"""Least budget that Anthropic allows."""
BLOCKS_MAX: Final = 4096
"""Most blocks of one message."""
ELSEWHERE: Final = frozenset(
    {"image", "document", "search_result", "container_upload", "server_tool_use", "tool_reference"}
    | {"mcp_tool_use", "mcp_tool_result", "web_search_tool_result", "web_fetch_tool_result"}
    | {"code_execution_tool_result", "bash_code_execution_tool_result", "tool_search_tool_result"}
    | {"text_editor_code_execution_tool_result", "compaction"}
)
"""Types of Anthropic's blocks that are not served."""
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
"""Fields that are ignored or refused. Ignored ones concern the platform: where a prompt is cached, who
pays, and what a server may cut from a long conversation."""

CacheControl = Annotated[dict[str, Any] | None, Field()]
"""Ignored: prompts are cached by their beginnings anyway."""
CallId = Annotated[str, StringConstraints(min_length=1, max_length=CALL_ID_CHARS_MAX)]


class TextBlockParam(Shape):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: list[Any] | None = None
    """Citations of an earlier answer, which are ignored: its text says the same."""


class ThinkingBlockParam(Shape):
    """A block of an assistant's reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinking(Shape):
    """Reasoning that only Anthropic can read. It is left out."""

    type: Literal["redacted_thinking"]
    data: str = ""


def _input(value: Any) -> Any:
    return arguments_object(call_arguments(value)) if isinstance(value, str) else value


class ToolUse(Shape):
    """A block with a tool call."""

    type: Literal["tool_use"]
    id: CallId
    name: Annotated[str, StringConstraints(min_length=1, max_length=CALL_ID_CHARS_MAX)]
    input: Annotated[dict[str, Any], BeforeValidator(_input, json_schema_input_type=dict[str, Any])]
    """Arguments: an object, or the text of one that was cut off, as a stream returns it."""
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = None
    """The caller of the tool, which is always the model."""
    toolset_name: Nothing = None


def _kind(value: Any, kinds: Mapping[str, type[Shape]]) -> Any:
    """Return a block, validated by the schema of its type."""
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
    """Return the validator of a text or of blocks of these types."""
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
"""Roles that releases of Claude Code were seen to send, and OpenAI's name for a system's."""


class MessageParam(Shape):
    """One message. Consecutive messages of one role are one turn."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        """Return an answer of any API in Anthropic's form."""
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
    """Return a chat message in Anthropic's form."""
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
    """Refuse one of Anthropic's own tools before its fields are validated."""
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
    """Ignored: arguments are always streamed as they come."""
    defer_loading: Annotated[bool, AfterValidator(_no)] = False
    allowed_callers: Annotated[list[str], AfterValidator(_direct)] = Field(default_factory=list)
    input_examples: Nothing = None


class ToolChoice(Shape):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Name of the tool, if the type is `tool`."""
    disable_parallel_tool_use: bool = False


class Thinking(Shape):
    """Whether the model reasons before it answers. It decides by itself how long."""

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
    """Body of POST /v1/messages/count_tokens: everything that becomes a prompt."""

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
    """The same as `output_config.format`, by its older name."""
    chat_template_kwargs: Words = Field(default_factory=dict)
    """Variables for the chat template, in addition to `thinking`."""
    thread: dict[str, Any] | None = None
    """A conversation that a server stores. None is stored here."""


class MessagesRequest(Sampled, CountRequest):
    """Body of POST /v1/messages. The fields that all APIs share are accepted, too."""

    max_tokens: Annotated[Whole, Field(ge=1)]
    stop_sequences: Annotated[list[StopString], FailFast(), Field(max_length=STOP_STRINGS_MAX)] = Field(
        default_factory=list
    )
    """Anthropic's name for `stop`."""
    stream: bool = False
