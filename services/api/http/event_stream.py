"""Server-sent events: their framing, their stream with keep-alives, and a fast path for plain text.

Proxies and load balancers cut a connection on which nothing was sent for a while, 60 s in most of them. A
stream that waits therefore sends its status, and now and then something that clients skip: a comment, or an
event without meaning (`silence-is-spoken`).
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Send

HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
MARK: Final = "\x00 the text \x00"

encode: Final = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Framing:
    """How chunks become events, and how a complete stream ends."""

    named: bool
    """Whether an event has a name, which is its chunk's `type`."""
    end: bytes
    keep_alive: bytes = b": keep-alive\n\n"
    """What clients skip, sent while nothing else is."""

    def events(self, chunks: Iterable[Mapping[str, Any]]) -> bytes:
        """Return the bytes of chunks as events. ASCII only, because some clients split lines at U+2028."""
        if self.named:
            return b"".join(
                b"event: %b\ndata: %b\n\n" % (chunk["type"].encode(), encode(chunk).encode())
                for chunk in chunks
            )
        return b"".join(b"data: %b\n\n" % encode(chunk).encode() for chunk in chunks)


PLAIN: Final = Framing(named=False, end=b"data: [DONE]\n\n")
NAMED: Final = Framing(named=True, end=b"")


class EventStream:
    """The events of one response. One task at a time writes them, and another sends keep-alives."""

    def __init__(self, send: Send, framing: Framing, silence_s: float) -> None:
        """`silence_s`: longest time without a byte, seconds, from now on."""
        self._send = send
        self.framing = framing
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._loop.time()
        self._is_writing = False
        self._keeping_alive: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        """The error of a keep-alive's sending, which the next write raises."""
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(silence_s, self._look)
        self.started = False
        """Whether the status was sent, after which no error status can be."""

    async def write(self, body: bytes, *, last: bool = False) -> None:
        """Send whole events at once. With `last`, end the response. Raises what a keep-alive raised."""
        if self._keeping_alive is not None:
            await self._keeping_alive
        if self._failure is not None:
            raise self._failure
        if last:
            self.close()
        self._is_writing = True
        try:
            await self._send_body(body, last=last)
        finally:
            self._is_writing = False

    async def settle(self) -> bool:
        """Send no more keep-alives. Returns whether the status was sent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._keeping_alive is not None:
            await self._keeping_alive
        return self.started

    def close(self) -> None:
        """Stop keep-alives: only `write` sends from now on. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._keeping_alive is not None:
            self._keeping_alive.cancel()

    async def _send_body(self, body: bytes, *, last: bool = False) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})
        self._sent_s = self._loop.time()

    def _look(self) -> None:
        """Send a keep-alive if it is due, unless a write is still waiting for the client to read."""
        left_s = self._silence_s if self._is_writing else self._sent_s + self._silence_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        self._keeping_alive = self._loop.create_task(self._keep_alive())

    async def _keep_alive(self) -> None:
        try:
            await self._send_body(self.framing.keep_alive)
        except Exception as error:
            self._failure = error  # nothing awaits this task until the next write
            return
        finally:
            self._keeping_alive = None
        if self._timer is not None:
            self._timer = self._loop.call_later(self._silence_s, self._look)


class TextEvent:
    """Events that differ in one text alone, as most of a stream does: rendered once, then filled in."""

    __slots__ = ("_after", "_before")

    def __init__(self, framing: Framing, render: Callable[[str], Iterable[Mapping[str, Any]]]) -> None:
        """`render`: makes the chunks of a text, which hold it once."""
        self._before, self._after = framing.events(render(MARK)).split(encode(MARK).encode())

    def of(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, encode(text).encode(), self._after)
