"""instructor: TOOLS, JSON and JSON_SCHEMA, and a stream of parts."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

model = os.environ["MODEL"]
like = '{"city": "Paris", "celsius": 20}'
ask = [{"role": "user", "content": f"What is the weather in Paris? Answer in JSON, like {like}."}]


class Weather(BaseModel):
    """What the weather is like in a city."""

    city: Literal["Paris", "London", "Tokyo"]
    celsius: int = Field(ge=-40, le=50)


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(OpenAI(), mode=mode)
    told = client.chat.completions.create(
        model=model, messages=ask, response_model=Weather, max_tokens=128, temperature=0, max_retries=3
    )
    assert isinstance(told, Weather)
    print(mode.name, told)

client = instructor.from_openai(OpenAI(), mode=instructor.Mode.TOOLS)
parts = list(
    client.chat.completions.create_partial(model=model, messages=ask, response_model=Weather, max_tokens=128)
)
assert parts[-1].city in ("Paris", "London", "Tokyo")
print("create_partial:", len(parts), "parts,", parts[-1])
