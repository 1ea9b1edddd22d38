"""The official Python client: chat, streams, tools, `.parse` and the stream helper."""

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


ask = [{"role": "user", "content": "What is the weather in Paris?"}]
reply = client.chat.completions.create(model=model, messages=ask, max_tokens=8, seed=1)
assert reply.usage.completion_tokens <= 8
print("chat:", reply.choices[0].finish_reason)

stream = client.chat.completions.create(
    model=model, messages=ask, max_tokens=8, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
assert chunks[-1].usage.total_tokens > 0
print("stream:", len(chunks), "events")

told = client.chat.completions.parse(model=model, messages=ask, response_format=Weather, max_tokens=64)
assert isinstance(told.choices[0].message.parsed, Weather)
print("parse:", told.choices[0].message.parsed)

tools = [pydantic_function_tool(Weather)]
called = client.chat.completions.parse(
    model=model, messages=ask, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=128
)
(call,) = called.choices[0].message.tool_calls
assert isinstance(call.function.parsed_arguments, Weather)
print("tools:", call.function.parsed_arguments)

result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "clear"})}
again = [*ask, called.choices[0].message, result]
reply = client.chat.completions.create(model=model, messages=again, tools=tools, max_tokens=16)
assert reply.choices[0].finish_reason in ("stop", "length", "tool_calls")
print("a result goes back:", reply.choices[0].finish_reason)

named = {"type": "function", "function": {"name": "Weather"}}
with client.chat.completions.stream(
    model=model, messages=ask, tools=tools, tool_choice=named, max_tokens=64
) as events:
    kinds = {event.type for event in events}
    final = events.get_final_completion()
assert "tool_calls.function.arguments.delta" in kinds
assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)
print("stream helper:", sorted(kinds))
