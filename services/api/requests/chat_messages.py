"""Conversion of chat messages into the input of a chat template, and checks between the fields of messages.

`schemas` has validated each field by itself before.
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
"""Estimate of the characters that a chat template writes around one message."""


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Input of a chat template, with an estimate of the prompt's length."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    documents: Sequence[Mapping[str, Any]]
    words: Mapping[str, Any]
    """Variables of the chat template in addition to the other fields here, by name."""
    add_generation_prompt: bool
    continues: bool
    """Whether the prompt ends inside the last message, without its end mark, so that the model continues that
    message."""
    chars: int
    """Estimated length of the prompt in characters."""


def chat_input(body: Conversation, tools: Sequence[OfferedTool]) -> ChatInput:
    """Return the chat template's input for a conversation. Raises ApiError if its messages do not fit
    together."""
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
    """Return an estimate of the characters that a template writes for a message, without its reasoning."""
    content = message.content or ""
    chars = len(content) if isinstance(content, str) else sum(len(part) + FRAME_CHARS for part in content)
    chars += sum(len(call.function.arguments) + FRAME_CHARS for call in message.tool_calls)
    return chars + len(message.name or "") + FRAME_CHARS


def _template_words(body: Conversation) -> dict[str, Any]:
    """Return the further template variables that a request sets. A reasoning effort sets `reasoning_effort`,
    and also the variables with which most templates switch reasoning on or off."""
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
    """Raise ApiError if a message lacks a field that its role needs, or has a field of another role."""
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
    """Raise ApiError if `continue_final_message` does not fit the last message or `add_generation_prompt`."""
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
"""One message of a chat, and its reasoning or None."""


def _joined_turns(messages: Sequence[Message], reasoning: Sequence[str | None]) -> list[Turn]:
    """Return the messages, where consecutive parts of one assistant's turn (reasoning, text, tool calls) are
    joined to one message.

    An answer of the Responses API consists of several items. Many chat templates do not accept two messages
    of one role in a row.
    """
    turns: list[Turn] = []
    for message, own in zip(messages, reasoning, strict=True):
        if turns and own is None and _continues(turns[-1][0], message):
            turns[-1] = _joined(turns[-1][0], message), turns[-1][1]
        else:
            turns.append((message, own))
    return turns


def _continues(turn: Message, message: Message) -> bool:
    """Return whether `message` continues the assistant's answer that began with `turn`."""
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
    """Return a message as the dictionary that chat templates take."""
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
    """Return a tool call for a chat template, with its arguments both as JSON text and as an object.
    `ChatTemplate` later picks the form that the template supports."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    object_ = arguments_object(call.function.arguments)
    return {"id": call.id, "type": call.type, "function": function, "object": object_}


def texts_of(message: Message, here: str) -> list[tuple[str, str]]:
    """Return all texts of a chat message as pairs of field path and text, such as (`messages[0].content`, …).
    `here`: path of the message."""
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
