"""Tests that a request with an offered upgrade is answered as one without."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Final

import pytest
from fastapi import FastAPI, Request

from baton.api.errors import ApiError
from baton.runtime.listening_ports import bind_port
from baton.web.http_server import serve_http

BODY: Final = b'{"model": "any"}'
OFFER: Final = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
"""Header fields of an offer, as Java's client sends them."""
REFUSED: Final = ApiError(400, "Invalid HTTP request received.", code="invalid_http")
WEB_SOCKET: Final = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app = FastAPI()

    @app.api_route("/echo", methods=["GET", "POST"])
    async def echo(request: Request) -> dict[str, object]:
        body = await request.body()
        return {"method": request.method, "body": body.decode(), "query": request.url.query}

    server = await serve_http(app, bind_port("127.0.0.1", 0, "--port"), 1)
    try:
        yield server.port
    finally:
        await server.stop()


def post(offer: bytes, body: bytes = BODY, query: bytes = b"") -> bytes:
    head = b"POST /echo%s HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n" % (
        query,
        offer,
        len(body),
    )
    return head + body


async def answers(port: int, pieces: list[bytes], count: int) -> list[tuple[int, object]]:
    """Return status and JSON of `count` answers to these pieces on one connection."""
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.002)
        got = []
        for _ in range(count):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            text = await reader.readexactly(length)
            got.append((int(head.split()[1]), json.loads(text) if "json" in head else text))
        writer.close()
    return got


def echoed(method: str, body: bytes, query: str = "") -> tuple[int, object]:
    return 200, {"method": method, "body": body.decode(), "query": query}


@pytest.mark.parametrize("offer", [OFFER, WEB_SOCKET], ids=["h2c", "websocket"])
async def test_a_body_comes_whole_whatever_is_offered_before_it(port: int, offer: bytes) -> None:
    assert await answers(port, [post(offer, query=b"?a=b%20c")], 1) == [echoed("POST", BODY, "a=b%20c")]


async def test_wherever_the_request_is_cut(port: int) -> None:
    whole = post(OFFER)
    for at in range(1, len(whole), 7):
        assert await answers(port, [whole[:at], whole[at:]], 1) == [echoed("POST", BODY)]


async def test_requests_behind_it_are_answered_too(port: int) -> None:
    """The requests come at once, with and without offers and bodies."""
    get = b"GET /echo HTTP/1.1\r\nHost: localhost\r\n" + OFFER + b"\r\n"
    sent = [post(OFFER), get, post(b"", b"second"), post(OFFER, b"third")]
    want = [echoed("POST", BODY), echoed("GET", b""), echoed("POST", b"second"), echoed("POST", b"third")]
    assert await answers(port, [b"".join(sent)], len(sent)) == want


async def test_a_body_in_chunks(port: int) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: localhost\r\n" + OFFER + b"Transfer-Encoding: chunked\r\n\r\n"
    body = b"6\r\nin two\r\n7\r\n chunks\r\n0\r\n\r\n"
    assert await answers(port, [head, body], 1) == [echoed("POST", b"in two chunks")]


async def test_what_looks_like_an_offer_in_the_body_is_the_body(port: int) -> None:
    body = b"GET /echo HTTP/1.1\r\nHost: localhost\r\n" + OFFER + b"\r\n"
    want = [echoed("POST", body), echoed("POST", BODY)]
    assert await answers(port, [post(OFFER, body), post(b"")], 2) == want


@pytest.mark.parametrize(
    "wrong",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 4\r\nContent-Length: 5\r\n",
        b"X-Folded: a\r\n GET /echo HTTP/1.1\r\nContent-Length: 4\r\n",
    ],
    ids=["two framings", "two lengths", "a folded field"],
)
async def test_a_head_that_could_be_read_in_two_ways_is_refused_with_an_offer_as_without_one(
    port: int, wrong: bytes
) -> None:
    for offer in (b"", OFFER):
        head = b"POST /echo HTTP/1.1\r\nHost: localhost\r\n" + offer + wrong + b"\r\n"
        [(status, told)] = await answers(port, [head + b"4\r\nbody\r\n0\r\n\r\n"], 1)
        assert (status, told) == (400, REFUSED.body)


async def test_no_client_gets_a_tunnel(port: int) -> None:
    [(status, _)] = await answers(port, [b"CONNECT here:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n"], 1)
    assert status in (400, 404, 405)
