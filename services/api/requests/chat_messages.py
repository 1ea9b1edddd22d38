"""Messages of a chat as its template takes them, and checks of what one field says of another.

Each field's own values are validated before (`schemas`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import to_json

from baton.api.errors import ApiError, invalid
from baton.api.requests.call_arguments import arguments_object
from baton.api.requests.meaning import OfferedTool
from baton.api.requests.schemas import ChatRequest, Conversation, Message, ToolCallParam, reasoning_of
from baton.api.text.chat_template import REASONING

FRAME_CHARS: Final = 32
"""Characters that a template puts around a message, about."""


@dataclass(frozen=True, slots=True)
class ChatInput:
    """What a chat template is given."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    documents: Sequence[Mapping[str, Any]]
    words: Mapping[str, Any]
    """Other variables of the template."""
    add_generation_prompt: bool
    continues: bool
    """Whether the prompt ends within the last message."""
    chars: int
    """Characters of the prompt, at a guess."""


def chat_input(body: Conversation, tools: Sequence[OfferedTool]) -> ChatInput:
    """Return what the chat template is given for a conversation. Raises ApiError for messages that make
    none."""
    reasoning = [*map(reasoning_of, body.messages)]
    _check_turns(body.messages, reasoning)
    _check_end(body)
    turns = _joined_turns(body.messages, reasoning)
    templates = [tool.template for tool in tools]
    chars = sum(map(_chars, body.messages)) + sum(len(each or "") for each in reasoning)
    chars += sum(len(to_json(each)) for each in (*templates, *body.documents))
    return ChatInput(
        messages=[_template_message(message, own) for message, own in turns],
        tools=templates,
        documents=body.documents,
        words=_template_words(body),
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continues=body.continue_final_message,
        chars=chars,
    )


def _chars(message: Message) -> int:
    """Return the characters that a template makes of a message without its reasoning, at a guess."""
    content = message.content or ""
    chars = len(content) if isinstance(content, str) else sum(len(part) + FRAME_CHARS for part in content)
    chars += sum(len(call.function.arguments) + FRAME_CHARS for call in message.tool_calls)
    return chars + len(message.name or "") + FRAME_CHARS


def _template_words(body: Conversation) -> dict[str, Any]:
    """Return the template's other variables. An effort is one of its own. Most templates also know how to
    switch reasoning off."""
    words: dict[str, Any] = {}
    if isinstance(body, ChatRequest) and (
        body.reasoning_effort is not None or "reasoning" in body.model_fields_set
    ):
        effort = body.effort
        if effort is not None:
            words["reasoning_effort"] = effort
        if effort == "none" or body.reasoning.enabled:
            words |= dict.fromkeys(("enable_thinking", "thinking"), effort != "none")
    return words | body.chat_template_kwargs


def _check_turns(messages: Sequence[Message], reasoning: Sequence[str | None]) -> None:
    """Raise ApiError for a message that lacks what its role needs, or has what belongs to another role."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        here = f"messages[{index}]"
        if message.role == "assistant":
            called.update(call.id for call in message.tool_calls)
        elif message.tool_calls:
            raise invalid(f"{here}.tool_calls", f"'{here}.tool_calls': only the assistant calls tools.")
        if message.role == "tool":
            _check_result(message, here, called)
        elif message.tool_call_id is not None:
            raise invalid(f"{here}.tool_call_id", f"'{here}.tool_call_id': only a tool answers a call.")
        if reasoning[index] is not None and message.role != "assistant":
            name = "reasoning" if message.reasoning_content is None else "reasoning_content"
            raise invalid(f"{here}.{name}", f"'{here}.{name}': only the assistant thinks.")
        if message.content is None and message.role != "assistant":
            raise _missing(f"{here}.content")


def _check_result(message: Message, here: str, called: set[str]) -> None:
    if message.tool_call_id is None:
        raise _missing(f"{here}.tool_call_id")
    if message.tool_call_id not in called:
        raise invalid(
            f"{here}.tool_call_id",
            f"'{here}.tool_call_id': no message before it has a call of this id in its 'tool_calls'.",
        )


def _check_end(body: Conversation) -> None:
    """Raise ApiError if the prompt cannot end as the request asks."""
    if not body.continue_final_message:
        return
    if "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
        raise invalid(
            "continue_final_message",
            "'continue_final_message' and 'add_generation_prompt' exclude each other.",
        )
    last = body.messages[-1]
    if last.role != "assistant" or last.tool_calls:
        raise invalid(
            "continue_final_message",
            "'continue_final_message' needs a last message of the assistant's own text.",
        )


Turn = tuple[Message, str | None]
"""A message and its reasoning."""


def _joined_turns(messages: Sequence[Message], reasoning: Sequence[str | None]) -> list[Turn]:
    """Return the messages, with reasoning, text and calls that came one by one joined to one assistant's
    turn.

    An answer of the Responses API is several items. Many chat templates take no two turns of one role.
    """
    turns: list[Turn] = []
    for message, own in zip(messages, reasoning, strict=True):
        if turns and own is None and _continues(turns[-1][0], message):
            turns[-1] = _joined(turns[-1][0], message), turns[-1][1]
        else:
            turns.append((message, own))
    return turns


def _continues(turn: Message, message: Message) -> bool:
    """Whether `message` is the rest of an answer that began with `turn`."""
    if not turn.role == message.role == "assistant":
        return False
    if turn.tool_calls:
        return bool(message.tool_calls) and not message.content
    return not turn.content if message.content else bool(message.tool_calls)


def _joined(turn: Message, message: Message) -> Message:
    return turn.model_copy(
        update={
            "content": message.content or turn.content,
            "tool_calls": [*turn.tool_calls, *message.tool_calls],
        }
    )


def _template_message(message: Message, reasoning: str | None) -> dict[str, Any]:
    """Return a message as chat templates take it."""
    content = message.content or None if message.tool_calls else message.content
    shaped: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        shaped["name"] = message.name
    if message.tool_calls:
        shaped["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        shaped["tool_call_id"] = message.tool_call_id
    if reasoning is not None:
        shaped[REASONING] = reasoning
    return shaped


def _template_call(call: ToolCallParam) -> Mapping[str, Any]:
    """Return a call with its arguments both as text and as an object. A template gets the form that it
    knows."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    object_ = arguments_object(call.function.arguments)
    return {"id": call.id, "type": call.type, "function": function, "object": object_}


def texts_of(message: Message, here: str) -> list[tuple[str, str]]:
    """Return all texts of a message, each with its path. `here`: path of the message."""
    content = message.content
    texts = (
        [(f"{here}.content", content)]
        if isinstance(content, str)
        else [(f"{here}.content[{index}].text", part) for index, part in enumerate(content or ())]
    )
    if message.name is not None:
        texts.append((f"{here}.name", message.name))
    if (reasoning := reasoning_of(message)) is not None:
        texts.append((f"{here}.reasoning_content", reasoning))
    for index, call in enumerate(message.tool_calls):
        function = f"{here}.tool_calls[{index}].function"
        texts += [
            (f"{function}.name", call.function.name),
            (f"{function}.arguments", call.function.arguments),
        ]
    return texts


def _missing(param: str) -> ApiError:
    return invalid(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")
