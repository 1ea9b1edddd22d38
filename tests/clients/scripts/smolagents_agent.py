"""smolagents: an agent that calls tools, and the model by itself with a form of output."""

import os
from typing import Any

from smolagents import OpenAIModel, Tool, ToolCallingAgent

model = OpenAIModel(
    model_id=os.environ["MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    max_tokens=128,
    temperature=0,
)


class Weather(Tool):
    name = "weather"
    description = "What the weather is like in a city."
    inputs = {"city": {"type": "string", "description": "Its name", "enum": ["Paris", "London"]}}
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"It is warm in {city}."


ask: Any = [{"role": "user", "content": [{"type": "text", "text": "What is the weather in Paris?"}]}]
reply = model.generate(ask, tools_to_call_from=[Weather()])
assert reply.tool_calls[0].function.name == "weather"
print("generate with a tool:", reply.tool_calls[0].function.arguments)

schema = {"type": "object", "properties": {"celsius": {"type": "integer"}}, "required": ["celsius"]}
form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
print("generate with a form:", model.generate(ask, response_format=form).content)

agent = ToolCallingAgent(tools=[Weather()], model=model, max_steps=2, verbosity_level=0)
answer = agent.run("What is the weather in Paris?")
steps = [each for each in agent.memory.steps if hasattr(each, "tool_calls") and each.tool_calls]
assert steps
print("ToolCallingAgent:", len(steps), "steps, each with a call that it could read")
