"""Server-sent events: framing, a stream with keep-alives, and a fast path for text.

Proxies and load balancers cut a connection on which nothing was sent for some time, most of them after 60 s.
So a stream that waits sends its HTTP status, and now and then something that clients ignore: a comment, or an
event without content (`silence-is-spoken`).
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii
from typing import Any, Final

from starlette.types import Send

HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
SEPARATE_KEEP_ALIVE: Final = b": keep-alive\n\n"
MARK: Final = "\x00 the text \x00"

encode: Final = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Framing:
    """Format in which one API writes chunks as server-sent events, and ends a complete stream."""

    named: bool
    """Whether each event has a name, which is the `type` of its chunk."""
    end: bytes
    keep_alive: bytes = b": keep-alive\n"
    """Bytes that are sent when there is nothing else to send. Clients ignore them. A comment has no empty
    line behind it: if an earlier event had an id, OpenAI's client takes the line for an event without
    data."""
    has_ids: bool = True
    """Whether each event of an answer has an id."""

    @property
    def without_ids(self) -> "Framing":
        """The framing for streams without ids. Clients that read none may expect an empty line behind each
        message."""
        return replace(self, keep_alive=SEPARATE_KEEP_ALIVE, has_ids=False)

    def event(self, chunk: Mapping[str, Any]) -> bytes:
        """Return a chunk encoded as an event. The bytes are ASCII only, because some clients split lines at
        U+2028."""
        if self.named:
            return b"event: %b\ndata: %b\n\n" % (chunk["type"].encode(), encode(chunk).encode())
        return b"data: %b\n\n" % encode(chunk).encode()

    def events(self, chunks: Iterable[Mapping[str, Any]]) -> bytes:
        return b"".join(map(self.event, chunks))


PLAIN: Final = Framing(named=False, end=b"data: [DONE]\n\n")
NAMED: Final = Framing(named=True, end=b"")


class EventStream:
    """The event-stream response of one request. One task at a time writes events, and another sends
    keep-alives."""

    def __init__(self, send: Send, framing: Framing, silence_s: float) -> None:
        """Start a stream that has sent nothing yet, and the timer of its keep-alives. `silence_s`: longest
        time in seconds without a byte."""
        self._send = send
        self.framing = framing
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._loop.time()
        self._is_writing = False
        self._keeping_alive: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        """Error that was raised when a keep-alive was sent. The next `write` raises it again."""
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(silence_s, self._look)
        self.started = False
        """Whether the HTTP status 200 was sent. No error status can be sent after it."""

    async def write(self, body: bytes, *, last: bool = False) -> None:
        """Send complete events. With `last`, also end the response. Raises the error of an earlier keep-alive
        that failed."""
        if self._keeping_alive is not None:
            await self._keeping_alive
        if self._failure is not None:
            raise self._failure
        if last:
            self.close()
        self._is_writing = True
        try:
            if not self.started:
                await self._start()
            await self._send({"type": "http.response.body", "body": body, "more_body": not last})
        finally:
            self._is_writing = False
        self._sent_s = self._loop.time()

    async def settle(self) -> bool:
        """Stop keep-alives, wait for one that is being sent, and return whether the HTTP status was sent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._keeping_alive is not None:
            await self._keeping_alive
        return self.started

    def close(self) -> None:
        """Stop keep-alives, and cancel one that is being sent. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._keeping_alive is not None:
            self._keeping_alive.cancel()

    async def _start(self) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})

    def _look(self) -> None:
        """Send a keep-alive if nothing was sent for too long, or start the timer again. None is sent while a
        write waits for the client to read."""
        left_s = self._silence_s if self._is_writing else self._sent_s + self._silence_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        self._keeping_alive = self._loop.create_task(self._keep_alive())

    async def _keep_alive(self) -> None:
        try:
            if not self.started:
                await self._start()
            await self._send(
                {"type": "http.response.body", "body": self.framing.keep_alive, "more_body": True}
            )
            self._sent_s = self._loop.time()
        except Exception as error:
            self._failure = error  # nothing awaits this task until the next write
            return
        finally:
            self._keeping_alive = None
        if self._timer is not None:
            self._timer = self._loop.call_later(self._silence_s, self._look)


class TextEvent:
    """Template of events that differ only in one text, as most events of a stream do. It is rendered once,
    and each text is then filled in."""

    __slots__ = ("_pieces",)

    def __init__(self, framing: Framing, render: Callable[[str], Iterable[Mapping[str, Any]]]) -> None:
        """Render the template. `render`: function that makes the chunks for a given text."""
        self._pieces = framing.events(render(MARK)).split(encode(MARK).encode())

    def of(self, text: str) -> bytes:
        return encode_basestring_ascii(text).encode().join(self._pieces)
