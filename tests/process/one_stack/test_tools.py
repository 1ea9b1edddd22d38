"""Tests of tool calls on a real stack, though the demo model's chat template has no tools."""

import json
from typing import Any, Final

import openai
import pytest
from pydantic import BaseModel, Field

from tests.http import web
from tests.process.stack import Stack


class Weather(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


ASK: Final[list[Any]] = [{"role": "user", "content": "How is the weather in Paris, for two days?"}]
STRICT: Final = openai.pydantic_function_tool(Weather)
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "Weather", "parameters": Weather.model_json_schema()},
}
FORCED: Final[list[Any]] = ["required", {"type": "function", "function": {"name": "Weather"}}]


@pytest.mark.parametrize("choice", FORCED, ids=["required", "named"])
def test_a_forced_call_is_one_whole_and_streamed(client: openai.OpenAI, model: str, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "messages": ASK,
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 120,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.message.tool_calls
    (call,) = whole.message.tool_calls
    assert call.type == "function"
    Weather.model_validate_json(call.function.arguments)
    assert (call.function.name, whole.message.content) == ("Weather", None)
    with client.chat.completions.stream(**asked) as stream:
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert calls
    (streamed,) = calls
    assert streamed.function.arguments == call.function.arguments


def test_a_conversation_goes_on_behind_a_call_of_a_strict_tool(
    client: openai.OpenAI, model: str, idle_stack: Stack
) -> None:
    """The model may call the tool at first, and has to later. The client's own `parse` accepts strict tools
    only."""
    asked: dict[str, Any] = {"model": model, "tools": [STRICT], "temperature": 0}
    message = client.chat.completions.create(messages=ASK, **asked, max_tokens=40).choices[0].message
    assert message.content or message.tool_calls
    asked |= {"max_tokens": 120, "parallel_tool_calls": False}
    forced = client.chat.completions.parse(messages=ASK, **asked, tool_choice="required").choices[0].message
    assert forced.tool_calls
    turns = [
        {"role": "tool", "tool_call_id": call.id, "content": '{"warm": true}'} for call in forced.tool_calls
    ]
    body = {
        "messages": [*ASK, forced.model_dump(exclude={"parsed"}, exclude_none=True), *turns],
        "max_tokens": 8,
    }
    for turn in body["messages"][1]["tool_calls"]:  # type: ignore[index]
        turn["function"].pop("parsed_arguments", None)
    reply = web().post(f"{idle_stack.url}/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert json.loads(reply.text)["choices"][0]["message"]["content"]
