"""A client that continues its streams at the next bootstrap, and the requests of all kinds that it sends."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from tests.http import web

ANSWER_S: Final = 120.0
AGAIN_S: Final = 0.1
TRIES_MAX: Final = 100
"""Most tries to continue a stream, at one bootstrap after the other."""
DONE: Final = "[DONE]"
LAST: Final = ("message_stop", "response.completed", "response.incomplete")
"""Types of the last event of a stream that ends without `[DONE]`."""

USER: Final[dict[str, Any]] = {"role": "user", "content": "Once upon a time, in a village by the sea,"}
DRAWN: Final[dict[str, Any]] = {"temperature": 0.9, "top_p": 0.95}
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
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [USER], "max_tokens": 60, "min_tokens": 40, **DRAWN, **fields}


KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "greedy": chat(temperature=0, top_p=1.0),
    "drawn": chat(),
    "seed": chat(seed=7),
    "choices": chat(n=4, max_tokens=40, min_tokens=30),
    "log-probabilities": chat(logprobs=True, top_logprobs=3),
    "schema": (
        CHAT,
        {
            "messages": [USER],
            "max_tokens": 120,
            **DRAWN,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        },
    ),
    "tool": (
        CHAT,
        {"messages": [USER], "max_tokens": 120, **DRAWN, "tools": [TOOL], "tool_choice": "required"},
    ),
    "completion": (COMPLETIONS, {"prompt": USER["content"], "max_tokens": 60, "min_tokens": 40, **DRAWN}),
    "message": (MESSAGES, {"messages": [USER], "max_tokens": 60, **DRAWN}),
    "response": (RESPONSES, {"input": USER["content"], "max_output_tokens": 60, **DRAWN}),
}
"""Path and body of a request of each kind."""


@dataclass
class ResumingClient:
    """A client of one stream, which goes on at the next of `urls` when its connection breaks."""

    urls: Sequence[str]
    path: str
    body: bytes
    ids: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    breaks: int = 0
    """Connections that broke in mid-stream."""
    refused: int = 0
    """Connections or requests that a bootstrap did not take."""
    done: bool = False

    def run(self, after: str = "") -> "ResumingClient":
        """Read the whole stream, or what comes after the event `after`. Raises AssertionError for an event
        that reports an error, a refusal of the resumption, and too many tries."""
        last_id = after
        for number in range(TRIES_MAX):
            with suppress(httpx.TransportError):
                self._read(self.urls[number % len(self.urls)], last_id)
            if self.done:
                return self
            last_id = self.ids[-1] if self.ids else after
            time.sleep(AGAIN_S)
        raise AssertionError(f"{self.path} did not end: {len(self.ids)} events, {self.refused} refusals")

    def read_once(self) -> None:
        """Read the stream of the first bootstrap until it ends or breaks, and do not go on elsewhere."""
        with suppress(httpx.TransportError):
            self._read(self.urls[0], "")

    def _read(self, url: str, last_id: str) -> None:
        headers = {"content-type": "application/json"} | ({"last-event-id": last_id} if last_id else {})
        began = False
        try:
            with web().stream(
                "POST", url + self.path, content=self.body, headers=headers, timeout=ANSWER_S
            ) as reply:
                if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                    reply.read()
                    self.refused += 1
                    return
                assert reply.status_code == httpx.codes.OK, reply.read()
                began, id_ = True, ""
                for line in reply.iter_lines():
                    name, _, value = line.partition(": ")
                    if name == "id":
                        id_ = value
                    elif name == "data":
                        self._take(id_, value)
        except httpx.TransportError:
            self.breaks += began
            self.refused += not began
            raise
        self.breaks += not self.done

    def _take(self, id_: str, data: str) -> None:
        if data == DONE:
            self.done = True
            return
        event = json.loads(data)
        assert "error" not in event, event
        if event.get("type") == "ping":
            return
        assert id_, f"an event without an id: {event}"
        self.ids.append(id_)
        self.events.append(without_counts(event))
        self.done = self.done or event.get("type") in LAST


def without_counts(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event without the counts of the prefix cache and the time of its end, which may differ."""
    for holder in (event, event.get("message") or {}, event.get("response") or {}):
        holder.pop("usage", None)
        holder.pop("completed_at", None)
    return event
