"""Tests of the real `anthropic` client against a real stack."""

from collections.abc import Iterator
from typing import Any, Final

import anthropic
import pytest

from tests.process.stack import Stack

QUESTION: Final[list[Any]] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: Final = {"temperature": 0}
WEATHER: Final[dict[str, Any]] = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    },
}


@pytest.fixture
def anthropics(idle_stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=idle_stack.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_a_message_a_stream_a_count_and_a_tool(anthropics: anthropic.Anthropic) -> None:
    (model,) = anthropics.models.list().data
    asked: dict[str, Any] = {"model": model.id, "messages": QUESTION}
    counted = anthropics.messages.count_tokens(**asked).input_tokens
    asked |= {"max_tokens": 32, "extra_body": GREEDY}
    whole = anthropics.messages.create(**asked)
    assert "Paris" in "".join(block.text for block in whole.content if block.type == "text")
    assert whole.stop_reason == "end_turn"
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == counted
    with anthropics.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]

    asked |= {"tools": [WEATHER], "max_tokens": 120}
    reply = anthropics.messages.create(**asked, tool_choice={"type": "tool", "name": "weather"})
    (call,) = reply.content
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert (reply.stop_reason, call.name, list(call.input)) == ("tool_use", "weather", ["city"])
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 20 degrees."}
    turns = [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    after = anthropics.messages.create(**{**asked, "messages": [*QUESTION, *turns], "max_tokens": 24})
    assert after.content
