"""Load on a stack: requests with known answers, some of which hang up in mid-stream."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from tests.http import web
from tests.idle import POLL_S
from tests.oracle import reference_greedy
from tests.process.stack import Stack

ANSWER_S: Final = 300.0
ROOMS_LISTED: Final = 1000
LONG: Final = 200
"""Tokens of a request whose client hangs up before they have come."""
ROUNDS_MAX: Final = 60
"""Most rounds of prompts. Prompts return to workers that had them, and every pair has served one after 3 to
17 rounds."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class Asked:
    """Prompts, and the reference library's continuation of each."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]


def any_prompts(lengths: Sequence[int], vocabulary: int, seed: int = 1) -> list[list[int]]:
    """Return a prompt of each length, with random ids below `vocabulary`."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


def asked(model: Path, prompts: Sequence[Sequence[int]], tokens: int) -> Asked:
    """Return requests with their greedy answers of at most `tokens` tokens."""
    answers = reference_greedy(model, prompts, tokens)
    assert len({tuple(each) for each in answers}) == len(prompts), "each prompt has an answer of its own"
    return Asked(prompts, answers)


@dataclass
class Load:
    """Rounds of requests that come together, one in `hang_up_each` of which leaves in mid-stream."""

    stack: Stack
    asked: Asked
    at_a_time: int = 16
    hang_up_each: int = 4
    rng: random.Random = field(default_factory=lambda: random.Random(5))
    wrong: list[str] = field(default_factory=list)
    served: dict[Pair, int] = field(default_factory=dict)
    """Whole answers by pair."""
    compared: set[int] = field(default_factory=set)
    """Prompts that were answered whole."""
    hung_up: int = 0
    _undealt: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._undealt = self.rng.sample(range(len(self.asked.prompts)), len(self.asked.prompts))

    async def round(self) -> None:
        """`at_a_time` requests in flight, in an order of their own."""
        async with httpx.AsyncClient(base_url=self.stack.url, timeout=ANSWER_S) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            await asyncio.gather(
                *(
                    self._compare(client, model, self._deal())
                    if number % self.hang_up_each
                    else self._leave(client, model, self._any())
                    for number in range(self.at_a_time)
                )
            )

    async def rounds_until(self, pairs: set[Pair], rounds_min: int) -> None:
        """Rounds until each of `pairs` has served whole requests and every prompt was answered whole; all
        answers right."""
        for number in range(ROUNDS_MAX):
            await self.round()
            assert not self.wrong, "\n".join(self.wrong) + "\n" + self.stack.tails()
            all_compared = len(self.compared) == len(self.asked.prompts)
            if number + 1 >= rounds_min and pairs <= self.served.keys() and all_compared:
                return
        raise AssertionError(
            f"after {ROUNDS_MAX} rounds, {pairs - self.served.keys()} served no request, and only prompts"
            f" {sorted(self.compared)} were answered whole"
        )

    def _deal(self) -> int:
        """A prompt: every one once, then any."""
        return self._undealt.pop() if self._undealt else self._any()

    def _any(self) -> int:
        return self.rng.randrange(len(self.asked.prompts))

    def _body(self, model: str, index: int) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": list(self.asked.prompts[index]),
            "temperature": 0,
            "return_token_ids": True,
        }

    async def _compare(self, client: httpx.AsyncClient, model: str, index: int) -> None:
        want = list(self.asked.answers[index])
        body = self._body(model, index) | {"max_tokens": len(want)}
        reply = await client.post("/v1/completions", json=body)
        if reply.status_code != 200:
            self.wrong.append(f"prompt {index}: {reply.status_code} {reply.text}")
            return
        pair = await self._pair(client, reply.headers["x-request-id"])
        self.served[pair] = self.served.get(pair, 0) + 1
        self.compared.add(index)
        ids = reply.json()["choices"][0]["token_ids"]
        if ids != want:
            self.wrong.append(f"{pair}: prompt {index} of {len(body['prompt'])}: {ids} expected {want}")

    async def _leave(self, client: httpx.AsyncClient, model: str, index: int) -> None:
        """Hang up when a few pieces of the answer have come, or none."""
        after = self.rng.choice((0, 1, 3, 8))
        body = self._body(model, index) | {"max_tokens": LONG, "ignore_eos": True, "stream": True}
        self.hung_up += 1
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                self.wrong.append(f"to hang up: {reply.status_code} {await reply.aread()!r}")
            pieces = 0
            if after == 0:
                return
            async for line in reply.aiter_lines():
                pieces += line.startswith("data: ")
                if pieces >= after:
                    break
                if "error" in line:
                    self.wrong.append(f"to hang up: {json.loads(line[6:])}")

    async def _pair(self, client: httpx.AsyncClient, request_id: str) -> Pair:
        rooms = (await client.get("/rooms", params={"request_id": request_id})).json()["rooms"]
        failed = [room["cause"] for room in rooms[1:]]
        if failed:
            self.wrong.append(f"served only in another room: {failed}")
        return rooms[0]["prefill"], rooms[0]["decode"]


@dataclass
class Answer:
    """Part of a streamed answer that has arrived."""

    request_id: str
    ids: list[int] = field(default_factory=list)
    error: dict[str, Any] | None = None
    over: bool = False

    def read(self, url: str, body: dict[str, Any]) -> None:
        headers = {"x-request-id": self.request_id}
        try:
            with web().stream(
                "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=ANSWER_S
            ) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        self._chunk(json.loads(line[6:]))
                    elif line.startswith("{"):
                        self._chunk(json.loads(line))
        finally:
            self.over = True

    def wait_ids(self, count: int) -> None:
        deadline = time.monotonic() + ANSWER_S
        while len(self.ids) < count:
            assert not self.over, (self.ids, self.error)
            assert time.monotonic() < deadline, (self.ids, self.error)
            time.sleep(POLL_S)

    def _chunk(self, chunk: dict[str, Any]) -> None:
        self.error = chunk.get("error", self.error)
        for choice in chunk.get("choices", ()):
            self.ids += choice.get("token_ids") or []
