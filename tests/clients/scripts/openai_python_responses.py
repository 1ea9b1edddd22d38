"""The official Python client: `/v1/responses`, whole, streamed, parsed, with tools and another turn."""

import json
import os
from typing import Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

client, model = OpenAI(), os.environ["MODEL"]


class Weather(BaseModel):
    """What the weather is like in a city."""

    city: Literal["Paris", "London", "Tokyo"]
    celsius: int = Field(ge=-40, le=50)


ask = "What is the weather in Paris?"
reply = client.responses.create(model=model, input=ask, instructions="Be brief.", max_output_tokens=16)
assert reply.status in ("completed", "incomplete")
assert reply.output_text
print("responses:", reply.status, reply.usage.total_tokens)

with client.responses.stream(model=model, input=ask, text_format=Weather, max_output_tokens=64) as stream:
    events = [event.type for event in stream]
    final = stream.get_final_response()
assert events[0] == "response.created"
assert "response.output_text.delta" in events
assert isinstance(final.output_parsed, Weather)
print("stream:", len(events), "events, the last is", events[-1])

told = client.responses.parse(model=model, input=ask, text_format=Weather, max_output_tokens=64)
assert isinstance(told.output_parsed, Weather)
print("parse:", told.output_parsed)

tool = pydantic_function_tool(Weather)["function"]
tools = [{"type": "function", **tool}]
called = client.responses.create(
    model=model,
    input=ask,
    tools=tools,
    tool_choice="required",
    parallel_tool_calls=False,
    max_output_tokens=96,
)
(call,) = [each for each in called.output if each.type == "function_call"]
Weather.model_validate_json(call.arguments)
print("tools:", call.name, call.arguments)

result = {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps({"sky": "clear"})}
turns = [{"role": "user", "content": ask}, *called.output, result]
reply = client.responses.create(model=model, input=turns, tools=tools, store=False, max_output_tokens=16)
assert reply.status in ("completed", "incomplete")
print("a result goes back:", reply.status)
