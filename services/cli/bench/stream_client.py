"""When did each piece of a streamed HTTP answer arrive?

One HTTP/1.1 connection that times what it reads and looks at nothing else: answers are understood after the
run (`answers`), so that the client takes little of a machine that it shares with the server it measures.
"""

import asyncio
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

from baton.cli.chat_settings import base_of

CONNECT_TIMEOUT_S: Final = 10.0
BYTES_MAX: Final = 64 * 2**20
"""Of one answer."""


class ServerBroke(Exception):
    """The connection or the answer did not hold. The text says how."""


class Lost(ServerBroke):
    """The connection ended before the first byte of an answer, as one that rested for long may."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where to ask."""

    host: str
    port: int
    tls: bool
    prefix: str
    """Of every path: empty, or a path such as /proxy."""
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def at(cls, url: str, api_key: str = "") -> "ServerAddress":
        """A base URL, with or without the /v1 at its end. Raises ValueError."""
        parts = urlsplit(base_of(url if "://" in url else f"http://{url}"))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url}: it has to be a URL such as http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        headers = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path, headers)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.prefix}"

    def post(self, path: str, body: bytes) -> bytes:
        """A whole request, as it goes over the wire."""
        lines = [
            f"POST {self.prefix}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream, application/json",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join((*lines, "", "")).encode("latin-1") + body


@dataclass(slots=True)
class Reply:
    """What came, and when, by `time.perf_counter`."""

    sent: float
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """Of the body, each with the time of the read that brought it."""
    ended: float = 0.0
    retry_after_s: float | None = None
    """From its header, where that is a number of seconds."""

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class Connection(asyncio.Protocol):
    """Asks one thing at a time. Made by `connect`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reply = Reply(0.0)
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._size = 0
        self._kept = True

    @property
    def usable(self) -> bool:
        """Whether another request can be asked over it."""
        return self._kept and self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes) -> Reply:
        """Send `request` and take in the whole answer. Raises ServerBroke; the connection is then closed."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._size = 0
        self._reply = Reply(time.perf_counter())
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._parser = None
        return self._reply

    def close(self) -> None:
        self._kept = False
        if self._transport is not None:
            self._transport.abort()

    # What the event loop tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but not by inheritance

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._parser is None:
            self.close()  # nobody asked
            return
        self._size += len(data)
        if self._size > BYTES_MAX:
            self._end(ServerBroke(f"an answer is longer than {BYTES_MAX} bytes"))
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ServerBroke(f"the answer is not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._kept = False
        why = f": {error}" if error else ""
        if self._size == 0:
            self._end(Lost(f"the server closed the connection without an answer{why}"))
        else:
            self._end(ServerBroke(f"the server closed the connection in the middle of an answer{why}"))

    # What the parser tells.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after" and value.strip().isdigit():
            self._reply.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._reply.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self._kept = self._kept and self._parser.should_keep_alive()
        self._reply.ended = self._now
        self._end(None)

    def _end(self, error: ServerBroke | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


async def connect(server: ServerAddress) -> Connection:
    """A connection that is open. Raises ServerBroke."""
    context = ssl.create_default_context() if server.tls else None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, server.host, server.port, ssl=context
            )
    except (OSError, TimeoutError) as error:
        raise ServerBroke(f"no connection to {server.url}: {error or 'it took too long'}") from None
    return connection


class ConnectionPool:
    """Those that rest between requests; as many as there are requests at a time."""

    def __init__(self, server: ServerAddress) -> None:
        self._server = server
        self._resting: list[Connection] = []

    async def ask(self, request: bytes) -> Reply:
        """Over a resting connection or a new one. Raises ServerBroke."""
        while self._resting:
            connection = self._resting.pop()
            if connection.usable:
                try:
                    return await self._over(connection, request)
                except Lost:
                    break  # it had rested for too long; nothing was answered
        return await self._over(await connect(self._server), request)

    async def open(self, count: int) -> None:
        """Have `count` of them rest. A server that is not there is for the requests to find."""
        with suppress(ServerBroke):
            while len(self._resting) < count:
                self._resting.append(await connect(self._server))

    def close(self) -> None:
        while self._resting:
            self._resting.pop().close()

    async def _over(self, connection: Connection, request: bytes) -> Reply:
        reply = await connection.ask(request)
        if connection.usable:
            self._resting.append(connection)
        else:
            connection.close()
        return reply
