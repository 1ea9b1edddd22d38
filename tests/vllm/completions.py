"""Requests for completions to a stack, with the ids of their answers."""

import json
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import httpx

from tests.process.stack import Stack

TOKENS = 24
CALL_S = 300.0


def complete(client: httpx.Client, prompt: Sequence[int] | str, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of an answer."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True} | fields
    reply = client.post("/v1/completions", json={"model": _model(client), **body})
    assert reply.status_code == 200, reply.text
    choices: list[dict[str, Any]] = reply.json()["choices"]
    return choices


def answer(client: httpx.Client, prompt: Sequence[int]) -> list[int]:
    """Return the ids that are drawn greedily behind `prompt`, ends ignored."""
    [choice] = complete(client, prompt, ignore_eos=True)
    ids: list[int] = choice["token_ids"]
    return ids


def stream(
    client: httpx.Client,
    prompt: Sequence[int] | str,
    on_tokens: Callable[[], None] | None = None,
    **fields: Any,
) -> list[int]:
    """Return the ids of a streamed answer, ends ignored. `on_tokens`: called once it has a few."""
    body = {"prompt": prompt, "stream": True, "ignore_eos": True, "return_token_ids": True} | fields
    ids: list[int] = []
    with client.stream("POST", "/v1/completions", json={"model": _model(client), **body}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    ids += choice.get("token_ids") or []
            if on_tokens is not None and len(ids) >= 10:
                on_tokens()
                on_tokens = None
    return ids


def _model(client: httpx.Client) -> str:
    name: str = client.get("/v1/models").json()["data"][0]["id"]
    return name


class Restart:
    """A worker that is killed and started anew, once, at the first call."""

    def __init__(self, stack: Stack, worker: str) -> None:
        self._stack = stack
        self._worker = worker
        self._lock = Lock()
        self.was_made = False

    def __call__(self) -> None:
        with self._lock:
            if not self.was_made:
                self.was_made = True
                self._stack.services[self._worker].kill()
                self._stack.restart(self._worker)
