"""How much may a client send that is no body, before and after it has asked, how long may it take to ask, and
how long may it leave unread what it is answered?

The server below takes a request line, headers and trailers of any length, from anybody, key or not, and waits
for them for as long as the connection is open. It ends no connection before all that was written is taken.
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
"""In a head, and as many in trailers: each is looked at several times."""
HEAD_S: Final = 20.0
STALLED_S: Final = 60.0
UNREAD_BYTES_MAX: Final = 64 * 1024
"""Whoever sends more waits for the client. Over TLS the event loop would take half a megabyte."""
READ_BYTES_MIN: Final = 4096
"""A client that takes less within `stalled_s` is taken for one that takes nothing."""
PIPELINED_MAX: Final = 16
PIPELINED_BYTES_MAX: Final = 64 * 1024
"""Of requests that wait behind the one that is being answered."""
FIELD_BYTES: Final = 128
"""What a field takes beside its text."""


class BoundedHttp(PlainHttp):
    """Refuses a head, or trailers, that are too long or do not end, and hangs up on whoever connects and does
    not ask, and on whoever asks and does not read."""

    head_s = HEAD_S
    """How long a connection may be open, or go on after its first byte since the last answer, without a whole
    head."""
    stalled_s = STALLED_S
    """How long a client may take next to nothing of what waits for it."""
    _got_on = False
    _bytes = 0
    """That came since the request last got on: its head was whole, some of its body came, or it ended."""
    _fields_bytes = 0
    """Of the request line and the fields that came whole since then; what comes at once may hold more."""
    _fields = 0
    _hang_up: asyncio.TimerHandle | None = None
    _unread = 0
    """Bytes, as they were when the client last took some, or more came."""
    _unread_since_s: float | None = None
    """When that was. None: nobody waits for the client, or it has just taken much."""
    _answering: RequestResponseCycle | None = None
    """The request that is being answered, or was last. Others, sent behind it, wait for that."""

    _head_bytes = 0
    """That a head that is not whole takes."""
    _pipelined_bytes = 0
    """That came while requests waited behind another."""

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
            answering.disconnected = True  # else an answer to nobody is an error
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
            self._answering.body = bytearray()  # what nobody has read of it
        if self.pipeline:
            self._answering, _ = self.pipeline[-1]
        super().on_response_complete()
        self.loop.call_soon(self._account)  # by then the system has taken what it takes
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
        """End the connection, unsent bytes and all, if what is sent waits for the client, or the connection's
        end does, and the client has taken next to nothing for so long. To be called again and again."""
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
        """Whether nothing that was asked for is lost if the connection ends."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered or self._body_open or self.flow.write_paused

    def _account(self) -> None:
        """Count what the connection holds."""
        if self._entry is not None:
            unread = self.transport.get_write_buffer_size()
            self._entry.hold(self._head_bytes + self._pipelined_bytes + unread)

    def _begin_fields(self) -> None:
        self._fields_bytes = self._fields = 0

    def _next_is_answered(self) -> None:
        """A request that no other is before is answered from here on."""
        if not self.pipeline:
            self._answering = self.cycle

    def _watch(self) -> None:
        """Let the time run while nothing else bounds the wait: no answer is on its way, and the connection
        does not rest since the last one, for which the server has a time of its own."""
        answering = self.cycle is not None and not self.cycle.response_complete
        begun = self._head_open or self._body_open
        resting = self.timeout_keep_alive_task is not None and not begun
        if answering or resting or self._refused or self.transport.is_closing():
            self._watch_no_more()
        elif self._hang_up is None:
            self._hang_up = self.loop.call_later(self.head_s, self._time_out_head)

    def _time_out_head(self) -> None:
        """Whoever began to ask is told so."""
        if self._head_open:
            self.refuse(SLOW_HEAD)
        else:
            self.transport.close()

    def _watch_no_more(self) -> None:
        if self._hang_up is not None:
            self._hang_up.cancel()
            self._hang_up = None
