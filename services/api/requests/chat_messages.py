"""Do these messages and tools make a conversation that a model can answer?

Each field's own shape is judged before (`schemas`); here is what one says of another.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from baton.api.errors import ApiError, invalid, shown
from baton.api.requests.call_arguments import arguments_object
from baton.api.requests.schemas import (
    AllowedTools,
    ChatRequest,
    Conversation,
    ForcedTool,
    Message,
    Tool,
    ToolCallParam,
    thought_of,
)
from baton.api.text.chat_template import THOUGHT
from baton.api.tools.parsing.output_parts import ToolSchemas


def check_turns(messages: Sequence[Message]) -> None:
    """Raise ApiError for a message without what its role needs, or with what belongs to another's."""
    called: set[str] = set()
    for place, message in enumerate(messages):
        here = f"messages[{place}]"
        if message.role == "assistant":
            called.update(call.id for call in message.tool_calls)
        elif message.tool_calls:
            raise invalid(f"{here}.tool_calls", f"'{here}.tool_calls': only the assistant calls tools.")
        if message.role == "tool":
            _check_result(message, here, called)
        elif message.tool_call_id is not None:
            raise invalid(f"{here}.tool_call_id", f"'{here}.tool_call_id': only a tool answers a call.")
        thought = thought_of(message)
        if thought is not None and message.role != "assistant":
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


def check_tools(tools: Sequence[Tool], choice: str | ForcedTool | AllowedTools = "auto") -> None:
    """Raise ApiError for a tool named twice, and one that is forced and not there."""
    names: set[str] = set()
    for place, tool in enumerate(tools):
        name = tool.function.name
        if name in names:
            param = f"tools[{place}].function.name"
            raise invalid(param, f"'{param}': there is another tool named \"{name}\".")
        names.add(name)
    if isinstance(choice, ForcedTool) and choice.name not in names:
        raise invalid("tool_choice", f"'tool_choice': 'tools' has none named \"{shown(choice.name)}\".")
    if isinstance(choice, AllowedTools):
        for name in choice.names:
            if name not in names:
                raise invalid("tool_choice", f"'tool_choice': 'tools' has none named \"{shown(name)}\".")
        if not choice.names:
            raise invalid("tool_choice", "'tool_choice' allows no tools; say \"none\" for that.")
    if choice == "required" and not tools:
        raise invalid("tool_choice", "'tool_choice' is required, and there are no 'tools'.")


def check_end(body: Conversation) -> None:
    """Raise ApiError where the prompt cannot end as it is asked to."""
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


def words_of(body: Conversation) -> dict[str, Any]:
    """For the chat template. An effort is a word of its own; without any, most know how not to think."""
    words: dict[str, Any] = {}
    if isinstance(body, ChatRequest):
        if body.effort is not None:
            words["reasoning_effort"] = body.effort
        if body.effort == "none" or body.reasoning.enabled:
            words |= dict.fromkeys(("enable_thinking", "thinking"), body.effort != "none")
    return words | body.chat_template_kwargs


def offered(body: ChatRequest) -> Sequence[Tool]:
    """The tools that may be called."""
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        return [tool for tool in body.tools if tool.function.name in choice.names]
    return () if choice == "none" else body.tools


def plain_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As a chat template takes them."""
    return [
        {"type": "function", "function": tool.function.model_dump(exclude_unset=True, exclude={"strict"})}
        for tool in tools
    ]


def schemas_of(tools: Sequence[Tool]) -> ToolSchemas:
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


def joined_turns(messages: Sequence[Message]) -> list[Message]:
    """The messages, in which reasoning, text and calls that came one by one are one turn of the assistant's.

    An answer of the Responses API is several items. Many chat templates take no two turns of one role.
    """
    turns: list[Message] = []
    for message in messages:
        if turns and _goes_on(turns[-1], message):
            turns[-1] = _together(turns[-1], message)
        else:
            turns.append(message)
    return turns


def _goes_on(turn: Message, message: Message) -> bool:
    """Whether `message` is the rest of an answer that began with `turn`."""
    if not turn.role == message.role == "assistant" or thought_of(message) is not None:
        return False
    if turn.tool_calls:
        return bool(message.tool_calls) and not message.content
    return not turn.content if message.content else bool(message.tool_calls)


def _together(turn: Message, message: Message) -> Message:
    return turn.model_copy(
        update={
            "content": message.content or turn.content,
            "tool_calls": [*turn.tool_calls, *message.tool_calls],
        }
    )


def plain(message: Message) -> dict[str, Any]:
    """As a chat template takes it."""
    content = message.content or None if message.tool_calls else message.content
    told: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        told["name"] = message.name
    if message.tool_calls:
        told["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        told["tool_call_id"] = message.tool_call_id
    if (thought := thought_of(message)) is not None:
        told[THOUGHT] = thought
    return told


def _plain_call(call: ToolCallParam) -> Mapping[str, Any]:
    """The arguments as a text and as an object: a template is given the one that it knows."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    object_ = arguments_object(call.function.arguments)
    return {"id": call.id, "type": call.type, "function": function, "object": object_}


def texts_of(message: Message, here: str) -> list[tuple[str, str]]:
    """All that it says, by the path of each."""
    said = message.content
    texts = (
        [(f"{here}.content", said)]
        if isinstance(said, str)
        else [(f"{here}.content[{place}].text", part) for place, part in enumerate(said or ())]
    )
    if message.name is not None:
        texts.append((f"{here}.name", message.name))
    if (thought := thought_of(message)) is not None:
        texts.append((f"{here}.reasoning_content", thought))
    for place, call in enumerate(message.tool_calls):
        function = f"{here}.tool_calls[{place}].function"
        texts += [
            (f"{function}.name", call.function.name),
            (f"{function}.arguments", call.function.arguments),
        ]
    return texts


def _missing(param: str) -> ApiError:
    return invalid(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")
