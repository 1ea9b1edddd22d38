"""Does the HTTP server keep to what its clients expect of connections?"""

import asyncio
from typing import Final

from fastapi import FastAPI

from services.runtime.http_server import serve_http
from services.runtime.listen import bind_port

CLIENTS_KEEP_S: Final = 5.0
"""How long httpx, and so the OpenAI client, keeps a connection that rests."""
REQUEST: Final = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"


async def test_a_connection_that_rested_as_long_as_clients_keep_one_still_serves() -> None:
    app = FastAPI()

    @app.get("/health")
    async def health() -> str:
        return "ok"

    server = await serve_http(app, bind_port("127.0.0.1", 0, "--port"), 1)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        for rest_s in (CLIENTS_KEEP_S + 1, 0):
            writer.write(REQUEST)
            async with asyncio.timeout(10):
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
                await reader.readuntil(b'"ok"')
            await asyncio.sleep(rest_s)
    finally:
        writer.close()
        await server.stop()
