"""How do server-sent events go out, one after the other, to a client that may stop reading?"""

import asyncio
import json
from collections.abc import Iterable
from typing import Any, Final

from starlette.types import Send

from services.openai.hangup import ClientGone

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

encode: Final = json.JSONEncoder(separators=(",", ":")).encode


class EventStream:
    """The events of one response. May be written to from several tasks."""

    def __init__(self, send: Send, stalled_client_s: float) -> None:
        """`stalled_client_s`: how long the client may leave what was sent unread."""
        self._send = send
        self._stalled_client_s = stalled_client_s
        self._turn = asyncio.Lock()
        self.started = False
        """Whether the status went out, and with it the chance of an error status."""

    async def write(self, body: bytes, *, last: bool = False) -> None:
        """Send whole events at once; with `last`, end the response. Raises ClientGone on a stall."""
        try:
            async with asyncio.timeout(self._stalled_client_s), self._turn:
                if not self.started:
                    self.started = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
                await self._send({"type": "http.response.body", "body": body, "more_body": not last})
        except TimeoutError:
            raise ClientGone from None


def events(chunks: Iterable[dict[str, Any]]) -> bytes:
    """Chunks as events. ASCII only, because some clients split lines at U+2028 and its like."""
    return b"".join(b"data: %b\n\n" % encode(chunk).encode() for chunk in chunks)
