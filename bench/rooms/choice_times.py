"""Times and KV bytes of requests with several answers, beside requests with one."""

import json
import random
import time
from typing import Any, Final

import httpx

from bench.rooms.room_times import TOKENS, filed_room, now_us, times_of

REQUEST_S: Final = 300.0
WARM_UP: Final = 2

Measured = dict[str, int]
"""Figures of one request: KV bytes sent, and microseconds until the first token, until the last answer's
first token, and until the end."""


def measured(
    url: str, runs: int, prompt_tokens: int, output_tokens: int, answers: int
) -> dict[int, list[Measured]]:
    """Measure requests with one answer and with `answers`, `runs` of each, in turns."""
    words = random.Random(time.monotonic_ns())  # noqa: S311 prompts that no cache has seen
    found: dict[int, list[Measured]] = {1: [], answers: []}
    with httpx.Client(base_url=url, timeout=REQUEST_S, trust_env=False) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        for run in range(WARM_UP + runs):
            for n in found if run % 2 else reversed(found):
                name = f"bench-{time.monotonic_ns()}"
                body = {
                    "model": model,
                    "prompt": words.choices(TOKENS, k=prompt_tokens),
                    "n": n,
                    "max_tokens": output_tokens,
                    "temperature": 1.0,
                    "ignore_eos": True,
                    "stream": True,
                    "return_token_ids": True,
                }
                asked = _ask(client, name, body)
                asked["bytes"] = times_of({}, filed_room(client, name)).length
                if run >= WARM_UP:
                    found[n].append(asked)
    return found


def _ask(client: httpx.Client, name: str, body: dict[str, Any]) -> Measured:
    sent_us = now_us()
    first_us: dict[int, int] = {}
    with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": name}) as reply:
        if reply.status_code != httpx.codes.OK:
            reply.read()
            raise RuntimeError(f"HTTP {reply.status_code}: {reply.text[:500]}")
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                at_us = now_us() - sent_us
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    if choice["token_ids"]:
                        first_us.setdefault(choice["index"], at_us)
    if len(first_us) != body["n"]:
        raise RuntimeError(f"{len(first_us)} answers came, {body['n']} were asked for")
    return {"first": min(first_us.values()), "every": max(first_us.values()), "whole": now_us() - sent_us}
