"""What may a conversation hold in the Responses API, item by item?"""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, StringConstraints
from pydantic_core import PydanticCustomError

from baton.api.errors import shown
from baton.api.requests.message_history import TEXT_PARTS, is_foreign, text_part, without_envelope
from baton.api.requests.schemas import (
    CALL_ID_CHARS_MAX,
    CALLS_MAX,
    MESSAGES_MAX,
    Message,
    Shape,
    call_arguments,
    read_message,
    reasoning_of,
)

ROLES: Final = ("user", "assistant", "system", "developer")
PARTS_MAX: Final = 8192
NO_CALL: Final = "none"
"""Which call is answered by a result that does not say it."""


def texts_of(value: Any) -> Any:
    """A text, or a list of parts → the text, or the parts' texts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "it has to be a text or a list of text parts")
    if len(value) > PARTS_MAX:
        raise PydanticCustomError("content_part", f"it holds more than {PARTS_MAX} parts")
    texts = []
    for place, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise PydanticCustomError("content_part", f"part {place} is not an object with a type")
        kind = part["type"]
        if kind not in TEXT_PARTS:
            raise PydanticCustomError(
                "content_part", f"part {place} is of the type '{shown(kind)}'; only texts are served"
            )
        if not isinstance(text := text_part(part), str):
            raise PydanticCustomError("content_part", f"part {place} has no text")
        texts.append(text)
    return texts


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
    """Somebody says something."""

    type: Literal["message"]
    role: Annotated[str, AfterValidator(_role)]
    content: Texts
    id: Id | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    """Of the assistant's; not told to the model."""


class CallItem(Shape):
    """The assistant calls a tool."""

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
    """A tool answers."""

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
    """The assistant thinks."""

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
    """An item of an answer that is kept."""

    type: Literal["item_reference"]
    id: Id


class ChatItem(Shape):
    """A message as another API has it."""

    message: Message


Told = MessageItem | CallItem | ResultItem | ReasoningItem
"""What an item says by itself."""
Item = Told | ReferenceItem
PART_KINDS: Final = frozenset(TEXT_PARTS)
MESSAGE_FIELDS: Final = frozenset(MessageItem.model_fields)


def with_type(value: Any) -> Any:
    """With its type, which a message and a reference may leave out."""
    if not isinstance(value, dict):
        return value
    if value.get("role") is not None and is_foreign(value, PART_KINDS):
        return ChatItem(message=Message.model_validate(read_message(value)))
    if value.get("type") in (None, "message") and value.get("role") == "assistant":
        value = without_envelope(value, MESSAGE_FIELDS)
    if value.get("type") is None:
        if "role" in value:
            return {**value, "type": "message"}
        if value.keys() <= {"id", "type"}:
            return {**value, "type": "item_reference"}
    return value


def few_items(value: Any) -> Any:
    """Before any of them is looked at."""
    if not isinstance(value, list):
        raise PydanticCustomError("prompt_type", "it has to be a text or a list of items")
    if len(value) > MESSAGES_MAX:
        raise PydanticCustomError("input", f"it holds {len(value)} items; at most {MESSAGES_MAX} are taken")
    return value


def kind_of_input(value: Any) -> str:
    return "text" if isinstance(value, str) else "items"


def items_of(message: Message) -> list[tuple[Told, str]]:
    """The items of an answer that another API gave, each with the field that it stands in."""
    texts = message.content or ""
    content: Any = texts if isinstance(texts, str) else _parts(texts, "input_text")
    if message.role == "tool":
        call_id = message.tool_call_id or NO_CALL
        return [(ResultItem(type="function_call_output", call_id=call_id, output=content), "")]
    items: list[tuple[Told, str]] = []
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


def plain(item: Told, id_: str) -> dict[str, Any]:
    """As it is sent. `id_`: where it has none."""
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
