"""Tests of SIGTERM under load: services finish what they accepted, and end with exit code 0.

Several workers of a side share the load meanwhile, leave it and come back to it. `test_serve.py`: the same of
`baton serve` as a whole.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.http import web
from tests.process.stack import STOP_S, Stack, running_stack
from tests.support.shared import Shared

CLIENTS: Final = 8
TOKENS: Final = 12
ANSWER_S: Final = 120.0
REFUSED: Final = (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
"""The connection was closed before anything was answered."""


@pytest.fixture(scope="module")
def stacks(demo_model_dir: Path) -> Iterator[Shared[Stack]]:
    with Shared(
        running_stack,
        str(demo_model_dir),
        prefill=[{}, {}],
        decode=[{}, {}],
        by_commands=True,
        kv_cache_memory="128MiB",
    ) as shared:
        yield shared


@pytest.fixture
def pairs(stacks: Shared[Stack], request: pytest.FixtureRequest) -> Stack:
    return stacks.lend(request.node)


@dataclass
class Clients:
    """Clients that send one request after the other until they are stopped or refused. Every second one
    streams its answer."""

    url: str
    model: str
    answered: int = 0
    streaming: int = 0
    """Streams of which something has come, and not yet the end."""
    wrong: list[str] = field(default_factory=list)
    """Answers that began and did not end as they should have."""
    refused: list[str] = field(default_factory=list)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, holds: Any) -> None:
        async with asyncio.timeout(ANSWER_S):
            while not holds():
                assert not self.wrong
                await asyncio.sleep(0.01)

    async def ask(self, number: int) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S) as client:
            turn = 0
            while not self.enough.is_set():
                body = {
                    "model": self.model,
                    "prompt": f"Number {number}.{turn}:",
                    "max_tokens": TOKENS,
                    "ignore_eos": True,
                    "temperature": 0,
                    "stream": number % 2 == 1,
                }
                try:
                    await (self._stream(client, body) if body["stream"] else self._whole(client, body))
                except REFUSED as error:
                    self.refused.append(repr(error))
                    return
                turn += 1

    async def _whole(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        reply = await client.post("/v1/completions", json=body)
        if reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == TOKENS:
            self.answered += 1
        else:
            self.wrong.append(f"{reply.status_code} {reply.text}")

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        lines: list[str] = []
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            try:
                async for line in reply.aiter_lines():
                    self.streaming += not lines
                    lines.append(line)
            except httpx.TransportError as error:
                lines.append(repr(error))
            finally:
                self.streaming -= bool(lines)
        if [line for line in lines if line][-1:] == ["data: [DONE]"]:
            self.answered += 1
        else:
            self.wrong.append(f"{reply.status_code} {lines[-3:]}")


@asynccontextmanager
async def load(stack: Stack) -> AsyncIterator[Clients]:
    """Keep clients busy, and check afterwards that every answer which began has ended as it should."""
    model = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
    clients = Clients(stack.url, model)
    asking = [asyncio.create_task(clients.ask(number)) for number in range(CLIENTS)]
    try:
        await clients.until(lambda: clients.answered >= CLIENTS and clients.streaming)
        yield clients
    finally:
        clients.enough.set()
        await asyncio.gather(*asking)
    assert clients.wrong == [], stack.tails()


async def test_workers_leave_under_load_and_return_and_no_request_fails(pairs: Stack) -> None:
    start = pairs.idle_gauges()
    async with load(pairs) as clients:
        for name in ("prefill-1", "decode-1"):
            leaving = pairs.services[name]
            tokens = "baton_prefill_tokens_total" if name == "prefill-1" else "baton_decode_tokens_total"
            assert leaving.total(tokens) > 0, f"{name} had work"
            assert await asyncio.to_thread(leaving.stop) == 0, leaving.tail()
            before = clients.answered
            await clients.until(lambda: clients.answered >= before + CLIENTS)  # noqa: B023
    assert clients.refused == []
    for name in ("prefill-1", "decode-1"):
        pairs.restart(name)
    pairs.wait_ready(4)
    pairs.wait_idle(start)


async def test_a_bootstrap_leaves_under_load_once_all_that_it_accepted_is_answered(pairs: Stack) -> None:
    async with load(pairs) as clients:
        bootstrap = pairs.services["bootstrap"]
        await clients.until(lambda: clients.streaming >= 2)
        before = clients.answered
        assert await asyncio.to_thread(bootstrap.stop) == 0, bootstrap.tail()
    assert clients.answered - before >= 2, "streams were under way"
    assert len(clients.refused) == CLIENTS, "whoever asked again was turned away, and nobody waits"


def test_past_its_drain_time_a_bootstrap_tells_each_client_why_before_it_ends(pairs: Stack) -> None:
    pairs.services["bootstrap"].stop()
    bootstrap = pairs.start_bootstrap(drain_timeout_ms="1s")
    pairs.wait_ready(4)
    body = {
        "model": web().get(f"{pairs.url}/v1/models").json()["data"][0]["id"],
        "prompt": "Count: 1 2 3",
        "max_tokens": 1500,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    events: list[dict[str, Any]] = []
    with web().stream("POST", f"{pairs.url}/v1/completions", json=body, timeout=ANSWER_S) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if len(events) == 3:
                    bootstrap.process.terminate()
    error = events[-1]["error"]
    assert error["code"] == "bootstrap_lost", error
    assert "drain time of 1 s has passed" in error["message"]
    assert bootstrap.process.wait(STOP_S) == 1, "not all that was accepted was answered"
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        assert pairs.services[name].stop() == 0, pairs.services[name].tail()
