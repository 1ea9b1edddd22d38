"""pydantic-ai: an agent with a tool, and outputs of all three modes."""

import os
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel

model = OpenAIChatModel(os.environ["MODEL"])
settings = {"max_tokens": 128, "temperature": 0}
ask = 'What is the weather in Paris? Answer in JSON, like {"city": "Paris", "celsius": 20}.'


class Weather(BaseModel):
    """What the weather is like in a city."""

    city: Literal["Paris", "London", "Tokyo"]
    celsius: int = Field(ge=-40, le=50)


modes = (ToolOutput(Weather), NativeOutput(Weather), PromptedOutput(Weather, template=False))
for mode in modes:
    told = Agent(model, output_type=mode, model_settings=settings).run_sync(ask)
    assert isinstance(told.output, Weather)
    print(type(mode).__name__, told.output)

asked = []
agent = Agent(model, model_settings=settings)


@agent.tool_plain
def weather(city: Literal["Paris", "London"]) -> str:
    """What the weather is like in a city."""
    asked.append(city)
    return f"It is warm in {city}."


reply = agent.run_sync("What is the weather in Paris?")
print("an agent with a tool that it may call:", len(asked), "calls,", reply.usage.requests, "requests")

told = Agent(model, output_type=weather, model_settings=settings).run_sync(ask)
assert told.output.startswith("It is warm in ")
print("a function that it has to call:", told.output)
