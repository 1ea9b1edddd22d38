"""HTTP protocol that refuses bad requests before any route, and then closes the connection gently.

The application writes the answer to a refused request, after the answers to earlier requests. Nothing more is
read as HTTP. The connection ends when the client ends it, or soon after. To close it at once would take the
answer from a client that is still sending.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from baton.runtime.log_throttle import LogThrottle
from baton.runtime.logging import Log
from baton.web.host_names import ANY_NAME, HostNames
from baton.web.http_refusals import IN_STATE, NO_HTTP, NO_METHOD, NO_METHOD_OF_OURS, TLS, HttpRefusal

log = Log(__name__)

LINGER_S: Final = 2.0
TLS_BEGINS: Final = b"\x16\x03"
REQUEST_LINE: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64} [!-~]+ HTTP/1\.[01]\r?\n")
HOST: Final = b"host"


class PortRefusals:
    """State that a port's connections share: allowed host names, and the rate limit for logs of refusals."""

    def __init__(self, hosts: HostNames = ANY_NAME) -> None:
        self.hosts = hosts
        self._throttle = LogThrottle()

    def log_refusal(self, refusal: HttpRefusal, client: str | None) -> None:
        if times := self._throttle.count():
            log.warning(
                "what a client sent was refused before it was a request",
                client=client,
                status=refusal.status,
                error=refusal.code,
                times=times,
            )


class RefusableHttp(HttpToolsProtocol):
    """HTTP/1.1 protocol that can refuse a request, and lets the application answer the refusal.

    The application gets a refusal as a request of its own, or with the request whose body is being received.
    """

    linger_s = LINGER_S
    is_refused = False
    """Whether a request of the connection was refused, so that nothing more is read as HTTP."""
    _head_open = False
    """Whether a request's head (request line and headers) has begun to arrive and is incomplete."""
    _body_open = False
    _head_came = False
    """Whether the bytes received last completed a request's head (request line and headers)."""

    def __init__(self, *args: Any, port_refusals: PortRefusals | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.port_refusals = port_refusals or PortRefusals()

    def refuse(self, refusal: HttpRefusal) -> None:
        """Refuse the current request for this reason. Data that arrives later is not read as HTTP."""
        if self.is_refused:
            return
        self.is_refused = True
        self._unset_keepalive_if_required()
        self.port_refusals.log_refusal(refusal, self.client[0] if self.client else None)
        if not self._body_open:
            self._request_answer(refusal)
            return
        cycle = self.cycle
        cycle.scope["state"][IN_STATE] = refusal
        cycle.keep_alive = False
        cycle.message_event.set()
        if cycle.response_complete:
            self._linger()

    def _request_answer(self, refusal: HttpRefusal) -> None:
        known = self.headers if self._head_open else []
        super().on_message_begin()
        self.headers.extend(known)
        self.scope |= {"method": NO_METHOD, "path": "", "raw_path": b"", "query_string": b""}
        self.scope["state"][IN_STATE] = refusal
        waits_for = self.cycle
        self.cycle = RequestResponseCycle(
            scope=self.scope,
            transport=self._last_transport(),
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=False,
            on_response=self.on_response_complete,
        )
        self.cycle.more_body = False
        if waits_for is None or waits_for.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.pipeline.appendleft((self.cycle, self.app))

    def _last_transport(self) -> asyncio.Transport:
        """Return a transport for the last answer. Closing it gives a client that is still sending some time
        to read the answer."""
        return cast(asyncio.Transport, _LingeringTransport(self.transport, self._end_after_answer))

    def _end_after_answer(self) -> None:
        """Close the connection after an answer. A client that is still sending gets time to read it."""
        if self.is_refused or (self._body_open and not self.pipeline):
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        if self.transport.is_closing():
            return
        self.is_refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(self.linger_s, self.transport.close)

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        self._unset_keepalive_if_required()
        self._head_came = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserInvalidMethodError:
            self.refuse(NO_HTTP if self._head_came else _of_no_method(data))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.refuse(NO_HTTP)

    def on_message_begin(self) -> None:
        if not self.is_refused:
            self._head_open = True
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self.is_refused:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_refused:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.is_refused:
            return
        hosts = [value for name, value in self.headers if name == HOST]
        refusal = self.port_refusals.hosts.refusal(self.parser.get_http_version(), self.url, hosts)
        if refusal is not None:
            self.refuse(refusal)
            return
        super().on_headers_complete()
        self.cycle.transport = self._last_transport()
        self._head_open, self._body_open, self._head_came = False, True, True

    def on_body(self, body: bytes) -> None:
        if not self.is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.is_refused:
            self._body_open = False
            super().on_message_complete()


def _of_no_method(begun: bytes) -> HttpRefusal:
    """Return the refusal for received data that does not begin with a known HTTP method."""
    if begun.startswith(TLS_BEGINS):
        return TLS
    return NO_METHOD_OF_OURS if REQUEST_LINE.match(begun) else NO_HTTP


class _LingeringTransport:
    """Transport for the last answer on a connection. Its `close` gives the client time to read the answer
    before the connection ends."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close
        self.write = transport.write
        self.is_closing = transport.is_closing
