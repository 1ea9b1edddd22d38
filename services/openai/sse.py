"""How do server-sent events go out, one after the other?"""

import json
from collections.abc import Callable, Iterable
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
    """How chunks are events, and how a stream ends that is whole."""

    named: bool
    """An event has a name, which is its chunk's `type`."""
    end: bytes

    def events(self, chunks: Iterable[dict[str, Any]]) -> bytes:
        """ASCII only, because some clients split lines at U+2028 and its like."""
        if self.named:
            return b"".join(
                b"event: %b\ndata: %b\n\n" % (chunk["type"].encode(), encode(chunk).encode())
                for chunk in chunks
            )
        return b"".join(b"data: %b\n\n" % encode(chunk).encode() for chunk in chunks)


PLAIN: Final = Framing(named=False, end=b"data: [DONE]\n\n")
NAMED: Final = Framing(named=True, end=b"")


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

    def __init__(self, framing: Framing, render: Callable[[str], Iterable[dict[str, Any]]]) -> None:
        """`render`: the chunks of a text, in which it stands once."""
        self._before, self._after = framing.events(render(MARK)).split(encode(MARK).encode())

    def of(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, encode(text).encode(), self._after)
