"""Functions and values that the checks of rows use: `a` in a check is the Answer."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from baton.api.requests.field_types import COMPLETION_TOKENS_DEFAULT
from tests.api import tiny
from tests.api.behaviours.sending import CHAT, Answer

VALUES: Final[Mapping[str, Any]] = {
    **yaml.safe_load((Path(__file__).parent / "values.yaml").read_text("utf-8")),
    "TOO_LONG": "a b " * 5_000,
}
OPENED_BY: Final = {
    "response.completed": "response.created",
    "response.output_item.done": "response.output_item.added",
    "response.output_text.done": "response.output_text.delta",
    "response.content_part.done": "response.content_part.added",
    "response.reasoning_text.done": "response.reasoning_text.delta",
    "response.reasoning_part.done": "response.reasoning_part.added",
    "response.function_call_arguments.done": "response.function_call_arguments.delta",
}
"""Event that opens something in a stream of Responses, by the event that closes it."""


def is_person(answer: Answer) -> bool:
    person = json.loads(answer.text)
    return set(person) == {"name", "age"} and type(person["age"]) is int


def is_object(answer: Answer) -> bool:
    return isinstance(json.loads(answer.text), dict)


def forced(answer: Answer) -> bool:
    """Return whether the first call has a known tool's name and arguments that fit its schema."""
    (name, arguments), *_ = answer.calls
    return (
        name in ("weather", "pokemon") and arguments["city"] in ("Paris", "Rome") and arguments["days"] <= 7
    )


def grows(answer: Answer) -> bool:
    """Return whether usage counts up event by event, and the last event has the total."""
    *counts, total = [event["usage"]["completion_tokens"] for event in answer.events]
    rising = [count for count in counts if count]
    return counts[-len(rising) :] == sorted({*rising}) and total == counts[-1] > 0


def of_the_prompt(answer: Answer) -> Any:
    """Return the log-probabilities of the prompt, which stand in another place on each route."""
    return answer.choice["prompt_logprobs"] if "text" in answer.choice else answer.body["prompt_logprobs"]


def output(answer: Answer, kind: str) -> list[Any]:
    """Return the items of this type in a response."""
    return [each for each in final(answer)["output"] if each["type"] == kind]


def output_text(answer: Answer) -> str:
    return "".join(part["text"] for item in output(answer, "message") for part in item["content"])


def final(answer: Answer) -> Any:
    """Return the whole response, of a stream from its last event."""
    return answer.events[-1]["response"] if answer.events else answer.body


def nests(answer: Answer) -> bool:
    """Return whether a stream of Responses closes everything, the last opened first."""
    opened: list[str] = []
    for kind in answer.types:
        if kind in OPENED_BY:
            if opened.pop() != OPENED_BY[kind]:
                return False
        elif kind.endswith(("created", "added")) or (kind.endswith("delta") and opened[-1] != kind):
            opened.append(kind)
    return not opened


def grown(answer: Answer) -> bool:
    """Return whether the deltas of a call's arguments join to its arguments."""
    deltas = [e["delta"] for e in answer.events if e["type"] == "response.function_call_arguments.delta"]
    (call,) = output(answer, "function_call")
    return "".join(deltas) == str(call["arguments"]) != ""


def blocks(answer: Answer, kind: str) -> list[Any]:
    """Return the content blocks of this type in a message, joined from deltas in a stream."""
    if not answer.events:
        return [each for each in answer.body["content"] if each["type"] == kind]
    found = {
        e["index"]: dict(e["content_block"]) for e in answer.events if e["type"] == "content_block_start"
    }
    for event in answer.events:
        if event["type"] == "content_block_delta":
            for name, piece in event["delta"].items():
                if name != "type":
                    block = found[event["index"]]
                    block[name] = (block.get(name) or "") + piece
    return [block for block in found.values() if block["type"] == kind]


def arguments(block: Any) -> Any:
    return json.loads(block["partial_json"]) if "partial_json" in block else block["input"]


def stop_reason(answer: Answer) -> Any:
    if not answer.events:
        return answer.body["stop_reason"]
    return next(e for e in answer.events if e["type"] == "message_delta")["delta"]["stop_reason"]


NAMES: Final[Mapping[str, Any]] = {
    **VALUES,
    **{
        each.__name__: each
        for each in (is_person, is_object, forced, grows, of_the_prompt, output, output_text, final)
    },
    **{each.__name__: each for each in (nests, grown, blocks, arguments, stop_reason, json, re)},
    "tiny": tiny,
    "CHAT": CHAT,
    "COMPLETION_TOKENS_DEFAULT": COMPLETION_TOKENS_DEFAULT,
    "IDS": tiny.ids("The fox"),
    "WEATHER": ("weather", {"city": "Rome", "days": 3}),
}
"""Names that a check can use."""


def passes(check: str, answer: Answer) -> bool:
    """Evaluate a row's expression."""
    return bool(eval(check, {**NAMES, "a": answer}))
