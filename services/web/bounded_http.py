"""HTTP protocol with limits on a request's head and trailers, on its time, and on unread answers.

A head is the request line and the headers. uvicorn's protocol takes heads and trailers of any length from any
client, with or without an API key. It waits for them as long as the connection is open. It ends no connection
before the client has read all that was written.
"""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from baton.web.client_connection import IN_STATE, ClientConnection
from baton.web.connection_limits import ConnectionEntry
from baton.web.http_refusals import LONG_HEAD, LONG_TARGET, PIPELINED, SLOW_HEAD, HttpRefusal
from baton.web.protocol_upgrades import PlainHttp

HEAD_BYTES_MAX: Final = 64 * 1024
HEADERS_MAX: Final = 256
"""Most headers of a request, and most fields of its trailers, because each field is looked at several times.
"""
HEAD_S: Final = 20.0
STALLED_S: Final = 60.0
UNREAD_BYTES_MAX: Final = 64 * 1024
"""Most unsent bytes before the application has to wait for the client. Over TLS uvloop would buffer half a
megabyte."""
READ_BYTES_MIN: Final = 4096
"""Number of bytes that a client has to read within `stalled_s`, or else its connection is stalled."""
PIPELINED_MAX: Final = 16
PIPELINED_BYTES_MAX: Final = 64 * 1024
"""Most bytes of the requests that wait on a connection behind the one that is being answered."""
FIELD_BYTES: Final = 128
"""Estimated memory of one header in addition to its text, bytes. It counts in the memory of the
connection."""


class BoundedHttp(PlainHttp):
    """HTTP/1.1 protocol that bounds how much a client may send, hold in memory and leave unread.

    It refuses heads (request line and headers) and trailers that are too long or do not end. It closes
    connections without a request, and those whose client does not read.
    """

    head_s = HEAD_S
    """Longest time of a connection without a whole head (request line and headers), seconds.

    It counts from the opening of the connection, or from the first byte after an answer.
    """
    stalled_s = STALLED_S
    """Longest time for which a client may read almost nothing of the bytes that wait for it, seconds."""
    _got_on = False
    _bytes = 0
    """Bytes received since the request last made progress. Progress is the end of its head (request line and
    headers), a part of its body, or its end."""
    _fields_bytes = 0
    """Bytes of the request target and headers, or of the trailer's fields, that were parsed so far. At most
    HEAD_BYTES_MAX are allowed."""
    _fields = 0
    _hang_up: asyncio.TimerHandle | None = None
    _unread = 0
    """Number of unsent bytes that waited for the client at the time `_unread_since_s`. The check for stalled
    clients compares it with the present number."""
    _unread_since_s: float | None = None
    """Time, on the event loop's clock in seconds, since which the client has read almost nothing. None if no
    bytes wait for the client, or if it has just read many."""
    _answering: RequestResponseCycle | None = None
    """Request that is being answered, or was answered last. Later requests on the connection wait for its
    end."""

    _head_bytes = 0
    """Memory of an incomplete head (request line and headers), bytes."""
    _pipelined_bytes = 0
    """Bytes of requests that were received while they had to wait for the answer to an earlier request of
    this connection."""

    def __init__(self, *args: Any, entry: ConnectionEntry | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._entry = entry

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(UNREAD_BYTES_MAX)
        self._client = ClientConnection(self.flow, lambda: self._body_open)
        if self._entry is not None:
            self._entry.close, self._entry.can_close = transport.abort, self._waits_for_client
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch_no_more()
        if self._entry is not None:
            self._entry.leave()
            self._entry = None
        answering = self._answering
        if answering is not None and not answering.response_complete:
            answering.disconnected = True  # otherwise uvicorn logs an error for the answer
            answering.message_event.set()
        self._client.lost()

    def data_received(self, data: bytes) -> None:
        self._got_on = False
        super().data_received(data)
        self._bytes = 0 if self._got_on else self._bytes + len(data)
        if self._bytes > HEAD_BYTES_MAX:
            self.refuse(LONG_HEAD)
        self._pipelined_bytes = self._pipelined_bytes + len(data) if self.pipeline else 0
        if self._pipelined_bytes > PIPELINED_BYTES_MAX:
            self.refuse(PIPELINED)
        self._head_bytes = 0
        if self._head_open:
            self._head_bytes = (self._bytes or len(data)) + self._fields * FIELD_BYTES
        if self._entry is not None:
            self._entry.move()
        self._account()
        self._watch()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_fields()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._fields_bytes += len(url)
        if self._fields_bytes > HEAD_BYTES_MAX:
            self.refuse(LONG_TARGET)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields_bytes += len(name) + len(value)
        self._fields += 1
        if self._fields_bytes > HEAD_BYTES_MAX or self._fields > HEADERS_MAX:
            self.refuse(LONG_HEAD)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._got_on = True
        self._begin_fields()
        if len(self.pipeline) >= PIPELINED_MAX:
            self.refuse(PIPELINED)
        self.scope["state"][IN_STATE] = self._client
        super().on_headers_complete()
        self._next_is_answered()

    def on_body(self, body: bytes) -> None:
        self._got_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._got_on = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._answering is not None:
            self._answering.body = bytearray()  # bytes that the application did not read
        if self.pipeline:
            self._answering, _ = self.pipeline[-1]
        super().on_response_complete()
        self.loop.call_soon(self._account)  # after the system has taken what it can
        self._watch()

    def refuse(self, refusal: HttpRefusal) -> None:
        super().refuse(refusal)
        self._next_is_answered()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._account()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since_s = None
        if self._entry is not None:
            self._entry.move()
        self._account()

    def end_if_stalled(self, stalled_s: float) -> None:
        """Abort the connection if its client has read almost nothing for `stalled_s` seconds.

        This counts only while unsent bytes, or the connection's end, wait for the client. Call it repeatedly.
        """
        self._account()
        if not (self.flow.write_paused or self.transport.is_closing()):
            self._unread_since_s = None
            return
        unread, now_s = self.transport.get_write_buffer_size(), self.loop.time()
        if self._unread_since_s is None or not self._unread - READ_BYTES_MIN < unread <= self._unread:
            self._unread, self._unread_since_s = unread, now_s
        elif now_s - self._unread_since_s >= stalled_s:
            self.transport.abort()

    def _waits_for_client(self) -> bool:
        """Return whether the connection waits for its client, so that closing it cuts no running answer.

        It waits for a request, for the rest of a body, or for the client to read.
        """
        answered = self.cycle is None or self.cycle.response_complete
        return answered or self._body_open or self.flow.write_paused

    def _account(self) -> None:
        """Report the connection's memory to the limits of its port: incomplete head, waiting requests and
        unsent bytes."""
        if self._entry is not None:
            unread = self.transport.get_write_buffer_size()
            self._entry.hold(self._head_bytes + self._pipelined_bytes + unread)

    def _begin_fields(self) -> None:
        self._fields_bytes = self._fields = 0

    def _next_is_answered(self) -> None:
        """Mark the latest request as the one that is being answered, unless earlier requests of the
        connection wait for their answer."""
        if not self.pipeline:
            self._answering = self.cycle

    def _watch(self) -> None:
        """Start or stop the timer for a request's head (request line and headers).

        It does not run while an answer is being sent, nor between two requests, for which uvicorn has a
        time-out.
        """
        answering = self.cycle is not None and not self.cycle.response_complete
        begun = self._head_open or self._body_open
        resting = self.timeout_keep_alive_task is not None and not begun
        if answering or resting or self.is_refused or self.transport.is_closing():
            self._watch_no_more()
        elif self._hang_up is None:
            self._hang_up = self.loop.call_later(self.head_s, self._time_out_head)

    def _time_out_head(self) -> None:
        """Refuse a request whose head did not arrive in time. If no head has begun, close the connection."""
        if self._head_open:
            self.refuse(SLOW_HEAD)
        else:
            self.transport.close()

    def _watch_no_more(self) -> None:
        if self._hang_up is not None:
            self._hang_up.cancel()
            self._hang_up = None
