"""Tools, tool calls and their results written as text, for chat templates that do not support tools.

The text is in Hermes' format, which most models have seen, and which Qwen's templates write. Tool
descriptions go into the system message, tool calls into the assistant's text, and results into a user's
message.

No I/O, clock or threads.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

BEFORE: Final = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
BEHIND: Final = """
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

Plain = Mapping[str, Any]


def with_tool_prompt(messages: Sequence[Plain], tools: Sequence[Plain], *, has_system: bool) -> list[Plain]:
    """Return chat messages with descriptions of the tools added to the system message.

    `has_system`: whether the chat template supports a system message. If not, the descriptions are put before
    the text of the first message.
    """
    text = BEFORE + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + BEHIND
    first, rest = messages[0], list(messages[1:])
    if first["role"] in ("system", "developer"):
        return [{**first, "content": _followed(first["content"], f"\n\n{text}")}, *rest]
    if has_system:
        return [{"role": "system", "content": text}, first, *rest]
    return [{**first, "content": _led(first["content"], f"{text}\n\n")}, *rest]


def with_calls_as_text(messages: Sequence[Plain]) -> list[Plain]:
    """Return chat messages with each tool call written as text into the content of its message."""
    made = []
    for message in messages:
        calls = message.get("tool_calls")
        if not calls:
            made.append(message)
            continue
        written = "\n".join(map(_call, calls))
        text = message["content"]
        content = _followed(text, f"\n{written}") if text else written
        made.append({**_without(message, "tool_calls"), "content": content})
    return made


def with_results_as_text(messages: Sequence[Plain]) -> list[Plain]:
    """Return chat messages with tool results written as text in the user's messages. Consecutive results
    become one message."""
    made: list[Plain] = []
    open_ = False
    for message in messages:
        if message["role"] != "tool":
            made.append(message)
            open_ = False
            continue
        text = f"<tool_response>\n{''.join(message['content'] or '')}\n</tool_response>"
        if open_:
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n{text}"}
        else:
            made.append({"role": "user", "content": text})
        open_ = True
    return made


def _call(call: Plain) -> str:
    name, arguments = json.dumps(call["function"]["name"], ensure_ascii=False), call["function"]["arguments"]
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _without(message: Plain, name: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != name}


def _followed(content: Any, text: str) -> Any:
    return [*content, text] if isinstance(content, list) else (content or "") + text


def _led(content: Any, text: str) -> Any:
    return [text, *content] if isinstance(content, list) else text + (content or "")
