"""A client's stream is kept alive whatever its request waits for: a room, its prompt, or another room."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.settings import ApiSettings
from baton.rooms.errors import Cause, Reason
from baton.runtime.listening_ports import bind_port
from baton.web.http_server import serve_http
from tests.api import tiny
from tests.bootstrap.scripted import LENGTH, D, House, P, Step, accepted, ended, first, house, tokens

SILENCE_S: Final = 0.05
PATIENCE_S: Final = 20.0
KEEP_ALIVE: Final = ": keep-alive\n"
BODY: Final = {"model": tiny.MODEL, "prompt": [5, 6, 7], "max_tokens": 3, "stream": True}
RETRACTED: Final = Cause(Reason.RETRACTED, "3 pages are needed for older rooms")
FAILED: Final = Cause(Reason.ENGINE_FAILED, "as it happens")


@asynccontextmanager
async def asking(at: House) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(at.backend, tiny.model(), CollectorRegistry(), ApiSettings(stream_silence_s=SILENCE_S))
    server = await serve_http(app, bind_port("127.0.0.1", 0, "test"), 1, answers_refusals=True)
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client,
        ):
            yield client
    finally:
        await server.stop()


async def answer(client: httpx.AsyncClient, go_on: Callable[[str], None]) -> str:
    """Return the whole text of a stream. `go_on` is called with the text so far after each piece."""
    text = ""
    async with client.stream("POST", "/v1/completions", json=BODY) as reply:
        assert reply.status_code == 200
        async for piece in reply.aiter_text():
            text += piece
            go_on(text)
    return text


def prefills(*before: Step) -> list[Step]:
    return [accepted(P), *before, first(9), ended(P)]


def decodes(*before: Step, start: int = 0) -> list[Step]:
    return [accepted(D), *before, tokens(start, [9] * (3 - start), LENGTH), ended(D)]


async def test_while_it_waits_in_line() -> None:
    async with house(places=1) as at, asking(at) as client:
        gate = asyncio.Event()
        at.prefill.script, at.decode.script = prefills(), decodes(gate)
        ahead = asyncio.create_task(answer(client, lambda _: None))
        while not at.decode.called:
            await asyncio.sleep(0.001)

        def go_on(text: str) -> None:
            if text == KEEP_ALIVE * 3:
                gate.set()

        answering = asyncio.create_task(answer(client, go_on))
        await ahead
        at.retired()
        behind = await answering
        assert behind.startswith(KEEP_ALIVE * 3)
        for text in (behind, await ahead):
            assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (lambda gate: [prefills(gate)], lambda gate: [decodes(gate)]),
        (
            lambda _: [[accepted(P)], prefills()],
            lambda gate: [[accepted(D), ended(D, RETRACTED)], decodes(gate)],
        ),
        (
            lambda _: [prefills(), prefills()],
            lambda gate: [
                [accepted(D), tokens(0, [9]), ended(D, RETRACTED)],
                decodes(gate, start=1),
            ],
        ),
        (
            lambda _: [[accepted(P), ended(P, FAILED)], prefills()],
            lambda gate: [[accepted(D)], decodes(gate)],
        ),
    ],
    ids=["its prompt is computed", "retracted before a token", "retracted behind some", "its prefill failed"],
)
async def test_while_it_waits_for_workers(
    prefill: Callable[[asyncio.Event], Sequence[Sequence[Step]]],
    decode: Callable[[asyncio.Event], Sequence[Sequence[Step]]],
) -> None:
    async with house(rooms_max=3, places=4) as at, asking(at) as client:
        gate = asyncio.Event()
        at.prefill.scripts, at.decode.scripts = list(prefill(gate)), list(decode(gate))

        def go_on(text: str) -> None:
            if text.endswith(KEEP_ALIVE * 3):
                gate.set()

        text = await answer(client, go_on)
        assert KEEP_ALIVE * 3 in text
        assert text.endswith("data: [DONE]\n\n")
        assert "error" not in text
