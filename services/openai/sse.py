"""How do server-sent events go out, one after the other?"""

import json
from collections.abc import Callable, Iterable
from typing import Any, Final

from starlette.types import Send

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

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        """Whether the status went out, and with it the chance of an error status."""

    async def write(self, body: bytes, *, last: bool = False) -> None:
        """Send whole events at once; with `last`, end the response."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})


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
