"""Conversion of conversations in any API's format into chat messages. So each API accepts the answers of the
others as history (`given-is-taken`).

    Responses   items: message, reasoning, function_call, function_call_output
    Anthropic   a message of blocks: text, thinking, redacted_thinking, tool_use
    chats       a message, also as other servers and client libraries write it

Each element of a conversation becomes one chat message, so that it keeps its index in the client's list.

No I/O, clock or threads.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator
from pydantic_core import PydanticCustomError

from baton.api.errors import shown
from baton.api.requests.tool_names import namespaced_name

TEXT_PARTS: Final[Mapping[str, str]] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Field of a text part that contains its text, by the part's `type`."""
REASONING_PARTS: Final[Mapping[str, str]] = {
    "thinking": "thinking",
    "reasoning_text": "text",
    "summary_text": "text",
    "reasoning.text": "text",
    "reasoning.summary": "summary",
    "reasoning": "text",
}
"""Field of a reasoning part that contains its text, by the part's `type`. The types are those of several
servers' formats."""
HIDDEN_PARTS: Final = frozenset({"redacted_thinking", "reasoning.encrypted"})
"""Types of encrypted reasoning parts, which only the server that made them can read. They are left out."""
CALL_PART: Final = "tool_use"
OTHER_PARTS: Final = REASONING_PARTS.keys() | HIDDEN_PARTS | {CALL_PART}
ITEMS: Final = frozenset({"function_call", "function_call_output", "reasoning"})
"""Types of the Responses API's conversation items that have no role and are no messages."""
ENVELOPE: Final = frozenset(
    {"id", "type", "status", "phase", "object", "created", "model", "usage", "index", "logprobs"}
    | {"finish_reason", "stop_reason", "stop_sequence", "stop_details", "container", "context_management"}
)
"""Fields of a response that describe the response itself and not its content, such as `id` and `usage`."""
PASSED_OVER: Final = frozenset(
    {"annotations", "citations", "extra_content", "provider_specific_fields", "cache_control"}
    | {"additional_kwargs", "response_metadata", "token_ids", "stop_reason"}
)
"""Fields that clients copy from responses in addition to the content, and that are ignored: sources,
signatures, data of other platforms."""
REASONING_LISTS: Final = ("reasoning_details", "thinking_blocks")
"""Message fields that contain reasoning as a list of parts, as OpenRouter and LiteLLM write it."""
REASONING: Final = ("reasoning_content", "reasoning", "thinking")
CALL_EXTRAS: Final = frozenset({"extra_content", "provider_specific_fields", "thought_signature", "caller"})
ASSISTANT: Final = "assistant"


def chat_message(value: Any, known: frozenset[str]) -> Any:
    """Return one element of a conversation, in any API's format, as a chat message. A value that is not an
    object is returned unchanged.

    `known`: names of a chat message's fields. Empty fields with other names are left out.
    """
    if not isinstance(value, dict):
        return value
    match value.get("type"):
        case "function_call":
            return _call_item(value)
        case "function_call_output":
            result = {"tool_call_id": value.get("call_id"), "content": value.get("output")}
            return {"role": "tool", **result}
        case "reasoning" if value.get("role") is None:
            parts = value.get("content") or value.get("summary")
            return {"role": ASSISTANT, "reasoning_content": _joined(parts, REASONING_PARTS)}
    if value.get("role") != ASSISTANT:
        return _own_fields(value, known)
    message = {
        name: each
        for name, each in value.items()
        if name not in PASSED_OVER and not (name in ENVELOPE and name not in known)
    }
    _take_parts(message)
    _take_reasoning(message)
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_without(call, CALL_EXTRAS) for call in calls]
    if isinstance(message.get("refusal"), str) and (refusal := message.pop("refusal")):
        message["content"] = message.get("content") or refusal
    return {name: each for name, each in message.items() if name in known or not _is_empty(each)}


def is_foreign(value: Mapping[str, Any], kinds: frozenset[str]) -> bool:
    """Return whether an element of a conversation, sent to Anthropic's or the Responses API, has another
    API's format.

    `kinds`: types of the content parts that the called API itself accepts.
    """
    if value.get("role") is None:
        return _kind(value) in ITEMS
    if value["role"] == "tool":
        return True
    if value["role"] != ASSISTANT:
        return False
    content = value.get("content")
    parts = content if isinstance(content, list) else ()
    return (
        content is None
        or any(value.get(name) is not None for name in ("tool_calls", *REASONING, *REASONING_LISTS))
        or bool(value.get("refusal"))
        or any(_kind(part) in OTHER_PARTS - kinds for part in parts)
    )


def without_envelope(value: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Return an assistant's message without fields that describe the response it came from. `known`: names of
    the fields that stay in any case."""
    return {
        name: each
        for name, each in value.items()
        if name in known
        or not (name in ENVELOPE or name in PASSED_OVER or name in REASONING_LISTS or _is_empty(each))
    }


def text_part(part: Mapping[str, Any]) -> Any:
    """Return the text of a content part, or None if it is not a text part."""
    kind = _kind(part)
    return None if kind not in TEXT_PARTS else part.get(TEXT_PARTS[kind])


def read_content(value: Any) -> Any:
    """Return a message's content, which is a text or a list of text parts in any API's format. A list becomes
    the list of the parts' texts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "it has to be a text or a list of text parts")
    texts = []
    for place, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
            raise PydanticCustomError("content_part", f"part {place} is not an object with a type")
        if kind not in TEXT_PARTS:
            why = f"part {place} is of the type '{shown(kind)}'; only texts are served"
            raise PydanticCustomError("content_part", why)
        if not isinstance(text := text_part(part), str):
            raise PydanticCustomError("content_part", f"part {place} has no text")
        texts.append(text)
    return texts


class TextPart(BaseModel):
    """A text part of a message's content. Other fields of the part are ignored."""

    type: Literal["text"]
    text: str


Content = Annotated[
    str | list[str], BeforeValidator(read_content, json_schema_input_type=str | list[TextPart])
]
"""Type of a message's content: a text, or the list of its parts' texts."""


def _own_fields(value: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Return a message that is not the assistant's, without ignored fields and without empty fields that
    clients add."""
    item = value.get("type") == "message"
    empty = ENVELOPE | PASSED_OVER | set(REASONING_LISTS) | set(REASONING)
    return {
        name: each
        for name, each in value.items()
        if name in known
        or not (
            name in ("cache_control", "provider_specific_fields")
            or (item and name in ("id", "type", "status"))
            or (name in empty and _is_empty(each))
        )
    }


def _take_parts(message: dict[str, Any]) -> None:
    """Move reasoning and tool calls from the parts of a message's content to the message's own fields."""
    content = message.get("content")
    if not isinstance(content, list):
        return
    kinds = [*map(_kind, content)]
    if not any(kind in OTHER_PARTS for kind in kinds):
        return
    paired = [*zip(kinds, content, strict=True)]
    message["content"] = [part for kind, part in paired if kind not in OTHER_PARTS] or None
    reasoning = [part for kind, part in paired if kind in REASONING_PARTS]
    if reasoning and not any(message.get(name) for name in REASONING):
        message["reasoning_content"] = _joined(reasoning, REASONING_PARTS)
    uses = [part for kind, part in paired if kind == CALL_PART]
    if uses and not message.get("tool_calls"):
        message["tool_calls"] = [_used(part) for part in uses]


def _take_reasoning(message: dict[str, Any]) -> None:
    """Move a message's reasoning to `reasoning_content`, from the other names and lists in which servers
    write it."""
    lists = [message.pop(name, None) for name in REASONING_LISTS]
    other = message.pop("thinking", None)
    if message.get("reasoning_content") or message.get("reasoning"):
        return
    parts = next((each for each in lists if isinstance(each, list) and each), ())
    text = other or _joined(parts, REASONING_PARTS)
    if text:
        message.pop("reasoning", None)
        message["reasoning_content"] = text


def _used(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return an Anthropic `tool_use` block as a tool call of a chat message."""
    function = {"name": part.get("name"), "arguments": part.get("input")}
    return {"id": part.get("id"), "type": "function", "function": function}


def _call_item(value: Mapping[str, Any]) -> dict[str, Any]:
    name, namespace = value.get("name"), value.get("namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        name = namespaced_name(name, namespace)
    function = {"name": name, "arguments": value.get("arguments")}
    call = {"id": value.get("call_id"), "type": "function", "function": function}
    return {"role": ASSISTANT, "tool_calls": [call]}


def _joined(parts: Any, kinds: Mapping[str, str]) -> str:
    """Return the texts of all parts of certain types as one string. `kinds`: name of the text field, by
    type."""
    texts = (
        part.get(kinds[part["type"]])
        for part in (parts if isinstance(parts, Sequence) and not isinstance(parts, str) else ())
        if _kind(part) in kinds
    )
    return "".join(text for text in texts if isinstance(text, str))


def _kind(value: Any) -> str:
    """Return the `type` of an item, a block or a content part; "" if it has none."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


def _without(value: Any, names: frozenset[str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: each for name, each in value.items() if name not in names}


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})
