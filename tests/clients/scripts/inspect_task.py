"""inspect-ai: a task of two samples, with a tool that has to be called, and one without."""

import os

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, ToolFunction, tool

model = get_model(
    f"openai-api/baton/{os.environ['MODEL']}",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    config=GenerateConfig(max_tokens=96, temperature=0),
)


@tool
def weather() -> Tool:
    async def execute(city: str) -> str:
        """What the weather is like in a city.

        Args:
            city: The name of the city.
        """
        return f"It is warm in {city}."

    return execute


samples = [Sample("Is it warm in Paris?", target="is"), Sample("Is it warm in London?", target="is")]
called = Task(
    name="called",
    dataset=samples,
    solver=[use_tools(weather(), tool_choice=ToolFunction("weather")), generate(tool_calls="single")],
    scorer=includes(),
)
plain = Task(name="plain", dataset=samples, solver=generate(), scorer=includes())
for log in eval([called, plain], model=model, display="none", log_dir="logs"):
    assert log.status == "success", log.error
    replies = [each for sample in log.samples for each in sample.messages if each.role == "assistant"]
    calls = sum(len(each.tool_calls or []) for each in replies)
    assert calls == len(samples) * (log.eval.task == "called")
    print(log.eval.task, log.status, calls, "calls")
