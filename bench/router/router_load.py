"""HTTP load of many small requests, from a client that costs little itself."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast

HOST: Final = "127.0.0.1"
PATIENCE_S: Final = 60.0
EVENT: Final = b"\ndata: {"
PLAIN_END: Final = b"\r\n\r\n"
CHUNKED_END: Final = b"\r\n0\r\n\r\n"
LENGTH: Final = b"content-length: "


@dataclass(slots=True)
class RouterLoad:
    """Result of one run of requests."""

    answered: int = 0
    events: int = 0
    """Chunks of streamed replies, with the first and the last of each reply."""
    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)


def body_of(model: str, prompt: str, tokens: int, tokens_a_message: int, *, stream: bool) -> bytes:
    """Return the bytes of a chat request. Echo workers read the seed as their tokens per message."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "seed": tokens_a_message,
        "stream": stream,
    }
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


async def run_load(ports: Sequence[int], request: bytes, concurrency: int, requests: int) -> RouterLoad:
    """Send `request` `requests` times over `concurrency` keep-alive connections, which take the `ports` in
    turn. Raises RuntimeError for a reply that is not a 200, TimeoutError for a missing one."""
    loop, load, ends = asyncio.get_running_loop(), RouterLoad(), asyncio.Event()
    connections: list[_Connection] = []
    for share in range(concurrency):
        quota = requests // concurrency + (share < requests % concurrency)
        connection = _Connection(request, quota, load, ends)
        await loop.create_connection(lambda made=connection: made, HOST, ports[share % len(ports)])  # type: ignore[misc]
        connections.append(connection)
    started = time.perf_counter()
    try:
        for connection in connections:
            connection.ask()
        async with asyncio.timeout(PATIENCE_S):
            while load.answered < requests and not any(connection.problem for connection in connections):
                await ends.wait()
                ends.clear()
        load.seconds = time.perf_counter() - started
    finally:
        for connection in connections:
            connection.close()
    for connection in connections:
        if connection.problem:
            raise RuntimeError(f"the bootstrap answered: {connection.problem}")
    return load


class _Connection(asyncio.Protocol):
    """Keep-alive connection that counts replies and parses as little as possible."""

    def __init__(self, request: bytes, quota: int, load: RouterLoad, ends: asyncio.Event) -> None:
        self._request = request
        self._quota = quota
        self._load = load
        self._ends = ends
        self._transport: asyncio.Transport | None = None
        self._asked_s = 0.0
        self._reply = bytearray()
        self.problem = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so

    def ask(self) -> None:
        if self._transport is not None and self._quota:
            self._quota -= 1
            self._reply.clear()
            self._asked_s = time.perf_counter()
            self._transport.write(self._request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply or self._quota:
            self.problem = self.problem or f"the connection was closed ({exc})"
        self._ends.set()

    def data_received(self, data: bytes) -> None:
        self._reply += data
        if self._over():
            self._load.latencies_s.append(time.perf_counter() - self._asked_s)
            if not self._reply.startswith(b"HTTP/1.1 200 "):
                self.problem = self._reply.decode(errors="replace")
            self._load.answered += 1
            self._load.events += self._reply.count(EVENT)
            self._reply.clear()
            self._ends.set()
            self.ask()

    def _over(self) -> bool:
        if self._reply.endswith(CHUNKED_END):
            return True
        head = self._reply.find(PLAIN_END)
        start = self._reply.find(LENGTH, 0, max(head, 0))
        if start < 0:
            return False
        length = int(self._reply[start + len(LENGTH) :].split(b"\r\n", 1)[0])
        return len(self._reply) >= head + len(PLAIN_END) + length
