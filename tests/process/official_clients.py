"""Streams through the Python clients of OpenAI and Anthropic."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import anthropic
import httpx2
import openai

from tests.process.stream_reader import ANSWER_S, DONE, Broken, Connect, Events, parse_events, refusal
from tests.process.streamed_requests import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Streamed

UNREACHABLE: Final = (openai.APIConnectionError, anthropic.APIConnectionError, httpx2.TransportError)
STATUS: Final = (openai.APIStatusError, anthropic.APIStatusError)
NAMED: Final = {
    CHAT: ("model", "messages"),
    COMPLETIONS: ("model", "prompt"),
    RESPONSES: ("model", "input"),
    MESSAGES: ("model", "messages", "max_tokens"),
}
"""Arguments of the clients' methods. Other fields go into `extra_body`."""


def resuming(request: Streamed, model: str) -> Connect:
    """Return a function that sends a request, and reads the lines of its stream. They have the ids of events,
    which the clients leave out of the objects that they make."""

    @contextmanager
    def connect(url: str, last_id: str) -> Iterator[Events]:
        with (
            _errors(),
            _resource(url, request.path).with_streaming_response.create(
                **_arguments(request, model),
                extra_headers={"Last-Event-ID": last_id} if last_id else {},
            ) as reply,
        ):
            yield parse_events(reply.iter_lines())

    return connect


def usual(request: Streamed, model: str) -> Connect:
    """Return a function that sends a request, and reads the objects that the client makes of its stream's
    events. They have no ids, so the stream cannot be continued."""

    @contextmanager
    def connect(url: str, last_id: str) -> Iterator[Events]:
        assert not last_id
        with _errors(), _resource(url, request.path).create(**_arguments(request, model)) as stream:
            yield _objects(stream)

    return connect


def _objects(stream: Any) -> Events:
    for event in stream:
        yield "", event.to_dict(mode="json")
    yield "", DONE


def _arguments(request: Streamed, model: str) -> dict[str, Any]:
    body = request.body(model)
    named = {name: body.pop(name) for name in NAMED[request.path]}
    return {**named, "stream": True, "extra_body": body}


def _resource(url: str, path: str) -> Any:
    """Return the part of a client whose method `create` posts to this path."""
    if path == MESSAGES:
        return _anthropic(url).messages
    client = _openai(url)
    return {CHAT: client.chat.completions, COMPLETIONS: client.completions, RESPONSES: client.responses}[path]


@cache
def _openai(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S)


@cache
def _anthropic(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=ANSWER_S)


@contextmanager
def _errors() -> Iterator[None]:
    """Raise the clients' errors as those of `Connect`."""
    try:
        yield
    except UNREACHABLE as error:
        raise Broken(repr(error)) from error
    except STATUS as error:
        raise refusal(error.status_code, json.dumps({"error": error.body})) from error
