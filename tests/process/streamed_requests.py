"""Requests of all kinds for tests of streams, and what is compared of their events."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

USER: Final[dict[str, Any]] = {"role": "user", "content": "Once upon a time, in a village by the sea,"}
DRAWN: Final[dict[str, Any]] = {"temperature": 0.9, "top_p": 0.95}
GREEDY: Final[dict[str, Any]] = {"temperature": 0}
SEEDED: Final[dict[str, Any]] = {**DRAWN, "seed": 7}
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "tags": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue"]},
            "minItems": 12,
            "maxItems": 12,
        },
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "paint", "parameters": SCHEMA, "strict": True},
}
JSON: Final[dict[str, Any]] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
}
PAINT: Final[dict[str, Any]] = {
    "tools": [{"name": "paint", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "paint"},
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
LONG_PROMPT: Final = " ".join(f"{USER['content']} {number}" for number in range(70))
"""700 words."""


@dataclass(frozen=True)
class Streamed:
    """A request for a stream."""

    path: str
    fields: dict[str, Any]

    @property
    def repeats(self) -> bool:
        """Whether each answer has the same tokens."""
        return self.fields.get("temperature") == 0 or "seed" in self.fields

    def body(self, model: str) -> dict[str, Any]:
        return {"model": model, **self.fields}

    def encode(self, model: str) -> bytes:
        return json.dumps({**self.body(model), "stream": True}).encode()


def chat(**fields: Any) -> Streamed:
    return Streamed(CHAT, {"messages": [USER], "max_tokens": 60, "min_tokens": 40, **fields})


def completion(**fields: Any) -> Streamed:
    return Streamed(COMPLETIONS, {"prompt": USER["content"], "max_tokens": 60, "min_tokens": 40, **fields})


def message(**fields: Any) -> Streamed:
    return Streamed(MESSAGES, {"messages": [USER], "max_tokens": 60, **fields})


def response(**fields: Any) -> Streamed:
    return Streamed(RESPONSES, {"input": USER["content"], "max_output_tokens": 60, **fields})


CONSTRAINED: Final[dict[str, Any]] = {"max_tokens": 120, "min_tokens": 0}
OPENAI: Final[dict[str, Streamed]] = {
    "greedy": chat(**GREEDY),
    "drawn": chat(**DRAWN),
    "seed": chat(**SEEDED),
    "choices": chat(**SEEDED, n=4, max_tokens=40, min_tokens=30),
    "log-probabilities": chat(**SEEDED, logprobs=True, top_logprobs=3),
    "schema": chat(**SEEDED, **CONSTRAINED, **JSON),
    "tool": chat(**SEEDED, **CONSTRAINED, tools=[TOOL], tool_choice="required"),
    "completion": completion(**SEEDED),
    "response": response(**GREEDY),
    "response, drawn": response(**DRAWN),
}
ANTHROPIC: Final[dict[str, Streamed]] = {
    "message": message(**GREEDY),
    "message, drawn": message(**DRAWN),
    "message, tool": message(**GREEDY, **PAINT),
}
KINDS: Final[dict[str, Streamed]] = OPENAI | ANTHROPIC
"""A request of each kind, by what is special about it."""

ANY: Final = frozenset({"id", "item_id", "call_id", "usage", "created", "created_at", "completed_at"})
"""Fields that differ between two equal answers: ids, times, and counts of the prefix cache."""


def without(fields: frozenset[str], value: Any) -> Any:
    """Return a value of JSON without these fields of its objects, at any depth."""
    if isinstance(value, dict):
        return {name: without(fields, each) for name, each in value.items() if name not in fields}
    if isinstance(value, list):
        return [without(fields, each) for each in value]
    return value


def by_choice(events: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return the events of each choice in order, without what differs between two equal answers. Which choice
    comes next depends on the time."""
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        choices = event.get("choices") or [{"index": 0}]
        found.setdefault(choices[0]["index"], []).append(without(ANY, event))
    return found
