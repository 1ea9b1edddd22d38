"""Tests of bad input to a real stack: refused by field name before the pipeline."""

import json
from typing import Any

import pytest

from tests.http import web
from tests.process.stack import Stack

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]

CASES: dict[str, tuple[str, Any, int, str | None]] = {
    "unknown model": (CHAT, {"model": "nope", "messages": HELLO}, 404, "model"),
    "empty messages": (CHAT, {"messages": []}, 400, "messages"),
    "unknown role": (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
    "no content": (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    "wrong type": (CHAT, {"messages": "hi"}, 400, "messages"),
    "negative max_tokens": (CHAT, {"messages": HELLO, "max_tokens": -1}, 400, "max_tokens"),
    "huge max_tokens": (CHAT, {"messages": HELLO, "max_tokens": 10**9}, 400, "max_tokens"),
    "too many logprobs": (
        CHAT,
        {"messages": HELLO, "logprobs": True, "top_logprobs": 21},
        400,
        "top_logprobs",
    ),
    "hot temperature": (CHAT, {"messages": HELLO, "temperature": 9}, 400, "temperature"),
    "too many choices": (CHAT, {"messages": HELLO, "n": 128, "max_tokens": 4000}, 400, "n"),
    "unknown argument": (CHAT, {"messages": HELLO, "fancy": 1}, 400, "fancy"),
    "empty prompt": (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    "prompt over the context": (COMPLETIONS, {"prompt": [1] * 9000}, 400, "prompt"),
    "prompt over every cache": (COMPLETIONS, {"prompt": [1] * 8000}, 400, "prompt"),
    "token out of vocabulary": (COMPLETIONS, {"prompt": [10**7]}, 400, "prompt[0]"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_at_intake_by_the_field(idle_stack: Stack, name: str) -> None:
    path, body, status, param = CASES[name]
    rooms = web().get(f"{idle_stack.url}/rooms").json()["rooms"]
    model = web().get(f"{idle_stack.url}/v1/models").json()["data"][0]["id"]
    reply = web().post(f"{idle_stack.url}{path}", json={"model": model, **body}, timeout=30)
    error = reply.json()["error"]
    assert reply.status_code == status, reply.text
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert web().get(f"{idle_stack.url}/rooms").json()["rooms"] == rooms, "no room was opened"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"model": ', 400),
        (b'{"model": "\xff\xfe"}', 400),
        (b"[]", 400),
        (b'{"messages": [{"role": "user", "content": "' + b"x" * 10_000_000 + b'"}]}', 413),
    ],
    ids=["malformed JSON", "bad UTF-8", "not an object", "a 10 MB body"],
)
def test_a_body_that_is_none_is_refused(idle_stack: Stack, content: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    reply = web().post(f"{idle_stack.url}{CHAT}", content=content, headers=headers, timeout=30)
    assert reply.status_code == status, reply.text
    assert set(json.loads(reply.text)["error"]) == {"message", "type", "param", "code"}
