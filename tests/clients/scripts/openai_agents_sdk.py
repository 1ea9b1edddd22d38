"""openai-agents: an agent with a tool and a form of output, over both of OpenAI's routes."""

import os
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

set_tracing_disabled(True)
ask = "What is the weather in Paris?"


class Weather(BaseModel):
    """What the weather is like in a city."""

    city: Literal["Paris", "London", "Tokyo"]
    celsius: int = Field(ge=-40, le=50)


@function_tool
def weather(city: Literal["Paris", "London"]) -> str:
    """What the weather is like in a city."""
    return f"It is warm in {city}."


kinds = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
for name in sys.argv[1:]:
    model = kinds[name](model=os.environ["MODEL"], openai_client=AsyncOpenAI())
    settings = ModelSettings(max_tokens=96, temperature=0)
    agent = Agent("Reporter", model=model, output_type=Weather, model_settings=settings)
    told = Runner.run_sync(agent, ask).final_output
    assert isinstance(told, Weather)
    print(name, "output_type:", told)

    settings = ModelSettings(max_tokens=96, temperature=0, tool_choice="required", parallel_tool_calls=False)
    agent = Agent(
        "Caller",
        model=model,
        tools=[weather],
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )
    done = Runner.run_sync(agent, ask)
    assert done.final_output.startswith("It is warm in ")
    print(name, "a tool:", done.final_output)

    agent = Agent("Talker", model=model, tools=[weather], model_settings=settings)
    done = Runner.run_sync(agent, ask, max_turns=4)
    print(name, "a tool, and an answer:", [type(each).__name__ for each in done.new_items])
