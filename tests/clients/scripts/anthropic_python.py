"""Anthropic's Python client: messages, streams, tools, `count_tokens`."""

import os
from typing import Any

from anthropic import Anthropic

client, model = Anthropic(), os.environ["MODEL"]
ask: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
tools: Any = [
    {
        "name": "weather",
        "description": "What the weather is like in a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "London"]}},
            "required": ["city"],
        },
    }
]

reply = client.messages.create(model=model, messages=ask, system="Be brief.", max_tokens=8)
assert reply.stop_reason in ("end_turn", "max_tokens")
assert reply.usage.output_tokens <= 8
print("messages:", reply.stop_reason)

with client.messages.stream(model=model, messages=ask, max_tokens=8) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_message()
assert kinds[0] == "message_start"
assert kinds[-1] == "message_stop"
print("stream:", len(kinds), "events,", final.stop_reason)

called = client.messages.create(
    model=model, messages=ask, tools=tools, tool_choice={"type": "tool", "name": "weather"}, max_tokens=96
)
(call,) = [each for each in called.content if each.type == "tool_use"]
assert called.stop_reason == "tool_use"
assert call.input["city"] in ("Paris", "London")
print("tools:", call.input)

with client.messages.stream(
    model=model, messages=ask, tools=tools, tool_choice={"type": "any"}, max_tokens=96
) as stream:
    final = stream.get_final_message()
assert any(each.type == "tool_use" and each.input["city"] for each in final.content)
print("tools in a stream:", final.stop_reason)

result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is warm."}
turns = [*ask, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
reply = client.messages.create(model=model, messages=turns, tools=tools, max_tokens=16)
print("a result goes back:", reply.stop_reason)

counted = client.messages.count_tokens(model=model, messages=ask, tools=tools)
assert counted.input_tokens > 0
print("count_tokens:", counted.input_tokens)
