"""How do server-sent events go out, one after the other, to a client that may stop reading?"""

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any, Final

from starlette.types import Send

from services.openai.hangup import ClientGone

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
MARK: Final = "\x00 the text \x00"

encode: Final = json.JSONEncoder(separators=(",", ":")).encode


class EventStream:
    """The events of one response. Written to by one task at a time."""

    def __init__(self, send: Send, stalled_client_s: float) -> None:
        """`stalled_client_s`: how long the client may leave what was sent unread."""
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._stalled_client_s = stalled_client_s
        self._sending: tuple[asyncio.Task[Any], float] | None = None
        """Who is at it, and since when."""
        self._watch: asyncio.TimerHandle | None = None
        """One for the response, not for each event: it looks again where it finds no stall."""
        self._stalled = False
        self.started = False
        """Whether the status went out, and with it the chance of an error status."""

    async def write(self, body: bytes, *, last: bool = False) -> None:
        """Send whole events at once; with `last`, end the response. Raises ClientGone on a stall."""
        task = asyncio.current_task(self._loop)
        if task is None:
            raise RuntimeError("events are sent by tasks")
        self._sending = task, self._loop.time()
        if self._watch is None:
            self._watch = self._loop.call_later(self._stalled_client_s, self._look)
        try:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            await self._send({"type": "http.response.body", "body": body, "more_body": not last})
        except asyncio.CancelledError:
            if self._stalled and not task.uncancel():
                raise ClientGone from None
            raise
        finally:
            self._sending = None
        if last and self._watch is not None:
            self._watch.cancel()

    def _look(self) -> None:
        """Has what is being sent been waiting for the client for too long?"""
        self._watch = None
        if self._sending is None:
            return  # the next event sets a new watch
        task, since_s = self._sending
        if (left_s := since_s + self._stalled_client_s - self._loop.time()) > 0:
            self._watch = self._loop.call_later(left_s, self._look)
        else:
            self._stalled = True
            task.cancel()


class TextEvent:
    """Events that differ in one text alone, which is most of what is streamed: rendered once."""

    __slots__ = ("_after", "_before")

    def __init__(self, render: Callable[[str], Iterable[dict[str, Any]]]) -> None:
        """`render`: the chunks of a text, in which it stands once."""
        self._before, self._after = events(render(MARK)).split(encode(MARK).encode())

    def of(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, encode(text).encode(), self._after)


def events(chunks: Iterable[dict[str, Any]]) -> bytes:
    """Chunks as events. ASCII only, because some clients split lines at U+2028 and its like."""
    return b"".join(b"data: %b\n\n" % encode(chunk).encode() for chunk in chunks)
