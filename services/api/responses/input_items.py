"""Schemas of the items of a conversation in the Responses API: messages, tool calls, results, reasoning."""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, StringConstraints
from pydantic_core import PydanticCustomError

from baton.api.requests.field_types import CALL_ID_CHARS_MAX, CALLS_MAX, MESSAGES_MAX, call_arguments
from baton.api.requests.message_history import TEXT_PARTS, is_foreign, read_content, without_envelope
from baton.api.requests.schemas import Message, Shape, read_message, reasoning_of

ROLES: Final = ("user", "assistant", "system", "developer")
PARTS_MAX: Final = 8192
NO_CALL: Final = "none"
"""Call id of a tool result in a message of another API that names no tool call."""


def texts_of(value: Any) -> Any:
    """Return a text unchanged, or the texts of a list of content parts. Raises PydanticCustomError."""
    if isinstance(value, list) and len(value) > PARTS_MAX:
        raise PydanticCustomError("content_part", f"it holds more than {PARTS_MAX} parts")
    return read_content(value)


def _role(value: str) -> str:
    if value not in ROLES:
        raise PydanticCustomError("role", f"the role has to be one of {', '.join(ROLES)}")
    return value


Texts = Annotated[
    str | list[str], BeforeValidator(texts_of, json_schema_input_type=str | list[dict[str, Any]])
]
Id = Annotated[str, StringConstraints(min_length=1, max_length=CALL_ID_CHARS_MAX)]
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Shape):
    """A conversation item with a message of any role."""

    type: Literal["message"]
    role: Annotated[str, AfterValidator(_role)]
    content: Texts
    id: Id | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    """Phase of an assistant's message: commentary or final answer. It is left out of the prompt."""


class CallItem(Shape):
    """A conversation item with a tool call of the assistant."""

    type: Literal["function_call"]
    call_id: Id
    name: Id
    arguments: Annotated[
        str, BeforeValidator(call_arguments, json_schema_input_type=str | dict[str, Any])
    ] = "{}"
    namespace: Id | None = None
    id: Id | None = None
    status: Status | None = None


class ResultItem(Shape):
    """A conversation item with the result of a tool call."""

    type: Literal["function_call_output"]
    call_id: Id
    output: Texts
    name: Id | None = None
    namespace: Id | None = None
    id: Id | None = None
    status: Status | None = None


class SummaryText(Shape):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Shape):
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Shape):
    """A conversation item with reasoning of the assistant."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], FailFast(), Field(max_length=CALLS_MAX)] = Field(
        default_factory=list
    )
    content: Annotated[list[ReasoningText], FailFast(), Field(max_length=CALLS_MAX)] = Field(
        default_factory=list
    )
    encrypted_content: str | None = None
    id: Id | None = None
    status: Status | None = None


class ReferenceItem(Shape):
    """A conversation item that refers to an item of a stored response."""

    type: Literal["item_reference"]
    id: Id


class ChatItem(Shape):
    """A conversation item that is a message in another API's form, such as one of Chat Completions."""

    message: Message


CompleteItem = MessageItem | CallItem | ResultItem | ReasoningItem
"""Conversation items that hold all of their content, unlike a reference to a stored item."""
Item = CompleteItem | ReferenceItem
PART_KINDS: Final = frozenset(TEXT_PARTS)
MESSAGE_FIELDS: Final = frozenset(MessageItem.model_fields)


def with_type(value: Any) -> Any:
    """Return a conversation item with its type, which a message and a reference may omit.

    A call of a custom tool and its result become those of a function. A message of another API becomes a
    ChatItem.
    """
    if not isinstance(value, dict):
        return value
    if value.get("role") is not None and is_foreign(value, PART_KINDS):
        return ChatItem(message=Message.model_validate(read_message(value)))
    if value.get("type") in (None, "message") and value.get("role") == "assistant":
        value = without_envelope(value, MESSAGE_FIELDS)
    if value.get("type") == "custom_tool_call":
        arguments = {"input": value.get("input")}
        call = {name: each for name, each in value.items() if name != "input"}
        return {**call, "type": "function_call", "arguments": arguments}
    if value.get("type") == "custom_tool_call_output":
        return {**value, "type": "function_call_output"}
    if value.get("type") is None:
        if "role" in value:
            return {**value, "type": "message"}
        if value.keys() <= {"id", "type"}:
            return {**value, "type": "item_reference"}
    return value


def few_items(value: Any) -> Any:
    """Return the list of items, or refuse one that is too long before any item is validated."""
    if not isinstance(value, list):
        raise PydanticCustomError("prompt_type", "it has to be a text or a list of items")
    if len(value) > MESSAGES_MAX:
        raise PydanticCustomError("input", f"it holds {len(value)} items; at most {MESSAGES_MAX} are taken")
    return value


def kind_of_input(value: Any) -> str:
    return "text" if isinstance(value, str) else "items"


def items_of(message: Message) -> list[tuple[CompleteItem, str]]:
    """Return the Responses API items for a message in another API's form, each with the path of its field in
    that message."""
    texts = message.content or ""
    content: Any = texts if isinstance(texts, str) else _parts(texts, "input_text")
    if message.role == "tool":
        call_id = message.tool_call_id or NO_CALL
        return [(ResultItem(type="function_call_output", call_id=call_id, output=content), "")]
    items: list[tuple[CompleteItem, str]] = []
    if thought := reasoning_of(message):
        text = ReasoningText(type="reasoning_text", text=thought)
        items.append((ReasoningItem(type="reasoning", content=[text]), ".reasoning_content"))
    if content or not (thought or message.tool_calls):
        items.append((MessageItem(type="message", role=message.role, content=content), ""))
    for place, call in enumerate(message.tool_calls):
        name, arguments = call.function.name, call.function.arguments
        item = CallItem(type="function_call", call_id=call.id, name=name, arguments=arguments)
        items.append((item, f".tool_calls[{place}]"))
    return items


def plain(item: CompleteItem, id_: str) -> dict[str, Any]:
    """Return a conversation item as JSON, in the form that the Responses API returns.

    `id_`: id for an item that has none.
    """
    told: dict[str, Any] = {"id": id_, **item.model_dump(exclude_none=True)}
    match item:
        case MessageItem(role="assistant"):
            told |= {"content": _parts(item.content, "output_text", annotations=[]), "status": "completed"}
        case MessageItem():
            told |= {"content": _parts(item.content, "input_text")}
        case ResultItem() if not isinstance(item.output, str):
            told |= {"output": _parts(item.output, "input_text")}
    return told


def _parts(texts: str | list[str], kind: str, **beside: Any) -> list[dict[str, Any]]:
    each = [texts] if isinstance(texts, str) else texts
    return [{"type": kind, "text": text, **beside} for text in each]
