"""LangChain's ChatOpenAI: invoke, stream, `bind_tools`, and the three ways of structured output."""

import os
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

chat = ChatOpenAI(model=os.environ["MODEL"], max_tokens=96, temperature=0)
short = ChatOpenAI(model=os.environ["MODEL"], max_tokens=8)
ask = "What is the weather in Paris?"


class Weather(BaseModel):
    """What the weather is like in a city."""

    city: Literal["Paris", "London", "Tokyo"]
    celsius: int = Field(ge=-40, le=50)


@tool
def weather(city: Literal["Paris", "London"]) -> str:
    """What the weather is like in a city."""
    return f"It is warm in {city}."


print("invoke:", short.invoke(ask).usage_metadata)
print("stream:", len(list(short.stream(ask))), "pieces")

for choice in ("any", "weather"):
    reply = chat.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False).invoke(ask)
    (call,) = reply.tool_calls
    print("bind_tools", choice, call["args"])
told = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
reply = short.bind_tools([weather]).invoke([HumanMessage(ask), reply, told])
print("a result goes back:", reply.response_metadata["finish_reason"])

pieces = list(chat.bind_tools([weather], tool_choice="any").stream(ask))
whole = pieces[0]
for piece in pieces[1:]:
    whole += piece
assert whole.tool_calls
print("bind_tools in a stream:", whole.tool_calls[0]["args"])

for method in ("json_schema", "function_calling"):
    told = chat.with_structured_output(Weather, method=method).invoke(ask)
    assert isinstance(told, Weather)
    print("with_structured_output", method, told)
told = chat.with_structured_output(None, method="json_mode").invoke(
    'What is the capital of France? Answer in JSON, like {"city": "Rome"}.'
)
assert isinstance(told, dict)
print("with_structured_output json_mode", told)
