"""Requests of all APIs, whose streams are cut and resumed behind each of their events."""

from dataclasses import dataclass
from typing import Any, Final

from tests.api import tiny
from tests.api.chat.test_tools import NOW, WEATHER
from tests.api.resuming.routers import SEED, Writer

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
USER: Final[dict[str, Any]] = {"role": "user", "content": "hi"}
CALL: Final = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "Paris {SEED}"}}}}\n</tool_call>'
TWO: Final = f'Let me see.\n{CALL}\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>'
REASONED: Final = f"<think>\nHm, they ask 😀 {SEED}.\n</think>\n\nHello, 東京! {TWO}"
PROSE: Final = f"The quick 😀 fox of {SEED} jumps over 東京.\nSTOP here, and on"
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "bb", "ccc"]}, "on": {"type": "boolean"}},
    "required": ["name", "on"],
    "additionalProperties": False,
}
FORMAT: Final[dict[str, Any]] = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
STRICT: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "pick", "parameters": SCHEMA, "strict": True},
}
USAGE: Final[dict[str, Any]] = {"include_usage": True}
OWN: Final[dict[str, Any]] = {"name": "now", "input_schema": {"type": "object"}}
MINE: Final[dict[str, Any]] = {"type": "function", **WEATHER["function"], "strict": False}


@dataclass(frozen=True)
class Case:
    """A request, and the model that answers it."""

    path: str
    body: dict[str, Any]
    writer: Writer


def chat(writer: Writer, **fields: Any) -> Case:
    return Case(CHAT, {"model": tiny.MODEL, "messages": [USER], "stream": True, **fields}, writer)


def completion(writer: Writer, **fields: Any) -> Case:
    fields = {"max_tokens": 40, **fields}
    return Case(COMPLETIONS, {"model": tiny.MODEL, "prompt": "hi", "stream": True, **fields}, writer)


def message(writer: Writer, **fields: Any) -> Case:
    body = {"model": tiny.MODEL, "max_tokens": 400, "messages": [USER], "stream": True, **fields}
    return Case(MESSAGES, body, writer)


def response(writer: Writer, **fields: Any) -> Case:
    return Case(RESPONSES, {"model": tiny.MODEL, "input": "hi", "stream": True, **fields}, writer)


CASES: Final = {
    "chat": chat(Writer(PROSE)),
    "chat, random tokens": chat(Writer()),
    "chat, usage": chat(Writer(PROSE), stream_options={**USAGE, "continuous_usage_stats": True}),
    "chat, n=3": chat(Writer(PROSE), n=3, stream_options=USAGE),
    "chat, n=2, seed": chat(Writer(), n=2, seed=7),
    "chat, tools": chat(Writer(TWO), tools=[WEATHER, NOW], stream_options=USAGE),
    "chat, tools, n=2": chat(Writer(TWO), tools=[WEATHER, NOW], n=2),
    "chat, forced call": chat(Writer(), tools=[STRICT], tool_choice="required", max_tokens=60),
    "chat, json_schema": chat(Writer(), response_format=FORMAT, stream_options=USAGE, max_tokens=50),
    "chat, reasoning": chat(Writer(REASONED), tools=[WEATHER, NOW]),
    "chat, reasoning in one piece": chat(Writer(REASONED), stream_reasoning=False),
    "chat, hidden reasoning": chat(Writer(REASONED), include_reasoning=False),
    "chat, stop": chat(Writer(PROSE), stop=["STOP", "never"], stream_options=USAGE),
    "chat, stop, n=2": chat(Writer(PROSE), stop=["STOP", "never"], n=2),
    "chat, logprobs": chat(Writer(PROSE), logprobs=True, top_logprobs=2, n=2),
    "chat, token ids": chat(Writer(PROSE), return_token_ids=True),
    "chat, cut off": chat(Writer(PROSE), max_tokens=9, stream_options=USAGE),
    "chat, own id": chat(Writer(PROSE), request_id="mine"),
    "completion": completion(Writer(PROSE), stream_options=USAGE),
    "completion, n=4": completion(Writer(), n=4),
    "completion, prompts": completion(Writer(PROSE), prompt=["one", "two"], n=2, stream_options=USAGE),
    "completion, nine answers": completion(Writer(tokens=4), n=9),
    "completion, logprobs, echo": completion(Writer(PROSE), logprobs=2, echo=True),
    "completion, echo alone": completion(Writer(PROSE), echo=True, max_tokens=0, stream_options=USAGE),
    "completion, stop": completion(Writer(PROSE), stop="STOP", include_stop_str_in_output=True),
    "completion, regex": completion(Writer(), structured_outputs={"regex": "(ab|c){4,9}"}),
    "message": message(Writer(PROSE)),
    "message, tools": message(Writer(TWO.replace("weather", "now")), tools=[OWN]),
    "message, reasoning": message(Writer(REASONED), tools=[OWN]),
    "message, stop": message(Writer(PROSE), stop_sequences=["STOP"]),
    "message, cut off": message(Writer(PROSE), max_tokens=9),
    "response": response(Writer(PROSE)),
    "response, tools": response(Writer(TWO), tools=[MINE]),
    "response, reasoning": response(
        Writer(REASONED), tools=[MINE], include=["reasoning.encrypted_content"], reasoning={"summary": "auto"}
    ),
    "response, reasoning text": response(Writer(REASONED)),
    "response, logprobs": response(
        Writer(REASONED), include=["message.output_text.logprobs"], top_logprobs=2, tools=[MINE]
    ),
    "response, json_schema": response(
        Writer(),
        max_output_tokens=50,
        text={"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
    ),
    "response, cut off": response(Writer(PROSE), max_output_tokens=9),
    "response, nothing": response(Writer(tokens=0), store=False),
}
