"""How is a model told of tools, calls and results where its chat template knows none of them?

In words that most models have seen, those of Hermes, which Qwen's templates write too: tools in the system
message, calls in the assistant's own text, results in a user's.

Pure.
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
    """The tools in the system message, or before what the first message says where there can be none."""
    text = BEFORE + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + BEHIND
    first, rest = messages[0], list(messages[1:])
    if first["role"] in ("system", "developer"):
        return [{**first, "content": _followed(first["content"], f"\n\n{text}")}, *rest]
    if has_system:
        return [{"role": "system", "content": text}, first, *rest]
    return [{**first, "content": _led(first["content"], f"{text}\n\n")}, *rest]


def with_calls_as_text(messages: Sequence[Plain]) -> list[Plain]:
    """Calls stand in the text of whoever called."""
    told = []
    for message in messages:
        calls = message.get("tool_calls")
        if not calls:
            told.append(message)
            continue
        words = "\n".join(map(_call, calls))
        said = message["content"]
        content = _followed(said, f"\n{words}") if said else words
        told.append({**_without(message, "tool_calls"), "content": content})
    return told


def with_results_as_text(messages: Sequence[Plain]) -> list[Plain]:
    """Results that follow each other are one message of the user's."""
    told: list[Plain] = []
    open_ = False
    for message in messages:
        if message["role"] != "tool":
            told.append(message)
            open_ = False
            continue
        text = f"<tool_response>\n{''.join(message['content'] or '')}\n</tool_response>"
        if open_:
            told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{text}"}
        else:
            told.append({"role": "user", "content": text})
        open_ = True
    return told


def _call(call: Plain) -> str:
    name, arguments = json.dumps(call["function"]["name"], ensure_ascii=False), call["function"]["arguments"]
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _without(message: Plain, name: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != name}


def _followed(content: Any, text: str) -> Any:
    return [*content, text] if isinstance(content, list) else (content or "") + text


def _led(content: Any, text: str) -> Any:
    return [text, *content] if isinstance(content, list) else text + (content or "")
