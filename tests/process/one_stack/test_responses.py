"""Tests of the real `openai` client against a real stack's Responses API."""

from typing import Any, Final

import openai
from pydantic import BaseModel, Field


class Weather(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


QUESTION: Final = "What is the capital of France?"
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "name": "weather",
    "parameters": Weather.model_json_schema(),
    "strict": False,
}


def test_an_answer_a_stream_an_object_and_a_tool(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_output_tokens": 32}
    whole = client.responses.create(input=QUESTION, **asked)
    assert "Paris" in whole.output_text
    assert whole.status == "completed"
    with client.responses.stream(input=QUESTION, **asked) as stream:
        streamed = stream.get_final_response()
    assert streamed.output_text == whole.output_text
    counted = client.responses.input_tokens.count(model=model, input=QUESTION)
    assert whole.usage is not None
    assert counted.input_tokens == whole.usage.input_tokens

    chat = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": whole.output_text},
            {"role": "user", "content": "And of Spain?"},
        ],
        temperature=0,
        max_tokens=32,
    )
    after = client.responses.create(input="And of Spain?", previous_response_id=whole.id, **asked)
    assert after.output_text == chat.choices[0].message.content

    asked["max_output_tokens"] = 120
    parsed = client.responses.parse(input="The weather in Paris, two days.", text_format=Weather, **asked)
    assert isinstance(parsed.output_parsed, Weather)
    asked |= {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    called = client.responses.create(input="The weather in Paris, two days?", **asked)
    (call,) = called.output
    assert call.type == "function_call"
    Weather.model_validate_json(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 20 degrees."}
    asked |= {"tool_choice": "none", "max_output_tokens": 24}
    assert client.responses.create(input=[result], previous_response_id=called.id, **asked).output_text
