"""LlamaIndex' OpenAILike: chat, stream, tools, structured output."""

import os
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

llm = OpenAILike(
    model=os.environ["MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    context_window=2048,
    max_tokens=96,
)


class Weather(BaseModel):
    """What the weather is like in a city."""

    city: Literal["Paris", "London", "Tokyo"]
    celsius: int = Field(ge=-40, le=50)


def weather(city: Literal["Paris", "London"]) -> str:
    """What the weather is like in a city."""
    return f"It is warm in {city}."


ask = ChatMessage(role="user", content="What is the weather in Paris?")
print("chat:", llm.chat([ask], max_tokens=8).raw.choices[0].finish_reason)
print("stream_chat:", len(list(llm.stream_chat([ask], max_tokens=8))), "pieces")

tools = [FunctionTool.from_defaults(weather)]
reply = llm.chat_with_tools(tools, user_msg=ask, tool_required=True)
(call,) = llm.get_tool_calls_from_response(reply)
print("chat_with_tools:", call.tool_name, call.tool_kwargs)
done = llm.predict_and_call(tools, user_msg=ask, tool_required=True)
print("predict_and_call:", done.response)

prompt = PromptTemplate("What is the weather in {city}?")
told = llm.structured_predict(Weather, prompt, city="Paris")
assert isinstance(told, Weather)
print("structured_predict:", told)
told = llm.as_structured_llm(Weather).chat([ask]).raw
assert isinstance(told, Weather)
print("as_structured_llm:", told)
