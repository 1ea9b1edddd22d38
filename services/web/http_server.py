"""How does an HTTP application run inside a service's own event loop, without taking its signals?"""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from functools import partial
from typing import Any, Final

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from baton.runtime.listening_ports import port_of
from baton.runtime.reachability import is_reachable_from_elsewhere
from baton.runtime.tls_files import TlsFiles, renewing
from baton.web.bounded_http import BoundedHttp
from baton.web.closed_connections import ClosedConnections
from baton.web.connection_acceptor import Acceptor
from baton.web.connection_limits import CONNECTIONS_MAX, ConnectionEntry, ConnectionLimits
from baton.web.host_names import HostNames
from baton.web.http_refusals import RefusalMiddleware
from baton.web.refusable_http import PortRefusals

START_TIMEOUT_S: Final = 10.0
KEEP_ALIVE_S: Final = 120.0
"""How long a connection may rest between two requests. Longer than clients and proxies keep theirs (5 s and
60 s are common): a server that hangs up first does so, now and then, on a request that is on its way."""
STALLED_AT_END_S: Final = 5.0
"""How long a client may take nothing once the server stops."""
PART_OF_GRACE: Final = 0.25
"""And at most this part of the time that it has for that."""
LOOKS: Final = 4
"""At all connections, within the time that a client may take nothing."""
HEADERS: Final = (
    ("X-Content-Type-Options", "nosniff"),  # what it is called is what it is
    ("Cross-Origin-Resource-Policy", "same-origin"),  # no page of another site shows or runs it
)
"""Of every answer."""


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, with an `Acceptor` and an event at its start."""

    def __init__(
        self,
        config: uvicorn.Config,
        sock: socket.socket,
        strangers: PortRefusals,
        connections: ClosedConnections,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._sock = sock
        self._strangers = strangers
        self._connections = connections
        self._limits = limits
        self._acceptor: Acceptor | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        made = partial(
            BoundedHttp, self.config, self.server_state, self.lifespan.state, strangers=self._strangers
        )

        def protocol(entry: ConnectionEntry) -> BoundedHttp:
            return made(entry=entry)

        tls: Any = self.config.ssl
        self._acceptor = Acceptor(self._sock, protocol, tls, self._connections, self._limits)
        self._acceptor.start()
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        await super().shutdown(sockets)


class HttpServer:
    """One application on one socket. Made by `serve_http`."""

    def __init__(self, server: uvicorn.Server, task: asyncio.Task[None], port: int) -> None:
        self._server = server
        self._task = task
        self._looking: asyncio.Task[None] | None = None
        self._allow(BoundedHttp.stalled_s)
        task.add_done_callback(lambda _: self._allow(None))
        self.port = port
        """The port it listens on."""

    async def stop(self) -> None:
        """Stop listening, let running requests finish within the graceful time, end. Idempotent.

        A client that reads nothing does not use that time up: it is hung up on.
        """
        self._server.should_exit = True
        if not self._task.done():
            grace_s = self._server.config.timeout_graceful_shutdown or 0
            self._allow(min(BoundedHttp.stalled_s, STALLED_AT_END_S, grace_s * PART_OF_GRACE))
        await asyncio.gather(self._task, return_exceptions=True)

    def _allow(self, stalled_s: float | None) -> None:
        """From here on a client may take nothing for so long. None: there are no clients any more."""
        if self._looking is not None:
            self._looking.cancel()
        self._looking = None if stalled_s is None else asyncio.create_task(self._end_stalled(stalled_s))

    async def _end_stalled(self, stalled_s: float) -> None:
        while True:
            for connection in list(self._server.server_state.connections):
                if isinstance(connection, BoundedHttp):
                    connection.end_if_stalled(stalled_s)
            await asyncio.sleep(stalled_s / LOOKS)


async def serve_http(
    app: ASGIApp,
    sock: socket.socket,
    graceful_timeout_s: int,
    tls: TlsFiles | None = None,
    *,
    hosts: HostNames | None = None,
    connections: ClosedConnections | None = None,
    answers_refusals: bool = False,
    keep_alive_s: float = KEEP_ALIVE_S,
    connections_max: int = CONNECTIONS_MAX,
) -> HttpServer:
    """Serve `app` on a socket from `bind_port` (owned from here on), over `tls` if there is one. Returns once
    it accepts requests.

    `graceful_timeout_s` bounds how long `stop` waits for running requests before it cancels them. `hosts`: by
    which names requests may call it; not given: any, but on an address that only this machine reaches, where
    whoever comes may be a web page. `answers_refusals`: the application knows of them (`http_refusal`).
    `keep_alive_s`: how long a connection may rest between two requests, seconds. `connections_max`: most
    connections at a time.
    Raises RuntimeError if it does not get that far, StartupError for certificates that cannot be used.
    """
    port = port_of(sock)
    # Of each connection. A reply over TLS is handed on at once: that it waits is not seen from here.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(BoundedHttp.stalled_s * 1000))
    strangers = PortRefusals(
        hosts or HostNames(any_name=is_reachable_from_elsewhere(str(sock.getsockname()[0])))
    )
    config = uvicorn.Config(
        app if answers_refusals else RefusalMiddleware(app),
        http=BoundedHttp,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        headers=list(HEADERS),
        timeout_graceful_shutdown=graceful_timeout_s,
        timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]  # seconds of `call_later`
    )
    config.load()
    if tls is not None:
        config.ssl = renewing(tls)  # the library's own would keep the first certificate for good
    connections = connections or ClosedConnections(CollectorRegistry())
    limits = ConnectionLimits(connections, connections_max)
    server = _Server(config, sock, strangers, connections, limits)
    task = asyncio.create_task(server.serve(sockets=[]), name="http server")
    listening = asyncio.create_task(server.listening.wait())
    try:
        await asyncio.wait((task, listening), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        listening.cancel()
        if not server.listening.is_set():
            task.cancel()
            sock.close()
    if not server.listening.is_set():
        raise RuntimeError(f"the HTTP server did not start within {START_TIMEOUT_S:g} s")
    return HttpServer(server, task, port)
