"""HTTP server for an ASGI application in a service's own event loop, without signal handlers of its own."""

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
"""Longest time that a connection may be idle between two requests, seconds.

It is longer than that of clients and proxies (5 s and 60 s are common). A server that closes a connection
first sometimes does so just as a request arrives.
"""
STALLED_AT_END_S: Final = 5.0
"""Longest time for which a client may read nothing while the server stops, seconds."""
PART_OF_GRACE: Final = 0.25
"""Upper bound of the time for which a client may read nothing while the server stops, as a fraction of the
graceful time-out."""
LOOKS: Final = 4
"""Number of times that all connections are checked within the time for which a client may read nothing."""
HEADERS: Final = (
    ("X-Content-Type-Options", "nosniff"),  # browsers do not guess the type
    ("Cross-Origin-Resource-Policy", "same-origin"),  # pages of other sites cannot embed it
)
"""Headers that the server adds to every HTTP response, for security in browsers."""


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, with an `Acceptor`, and an event that says it listens."""

    def __init__(
        self,
        config: uvicorn.Config,
        sock: socket.socket,
        port_refusals: PortRefusals,
        connections: ClosedConnections,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._sock = sock
        self._port_refusals = port_refusals
        self._connections = connections
        self._limits = limits
        self._acceptor: Acceptor | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        make = partial(
            BoundedHttp,
            self.config,
            self.server_state,
            self.lifespan.state,
            port_refusals=self._port_refusals,
        )

        def protocol(entry: ConnectionEntry) -> BoundedHttp:
            return make(entry=entry)

        tls: Any = self.config.ssl
        self._acceptor = Acceptor(self._sock, protocol, tls, self._connections, self._limits)
        self._acceptor.start()
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        await super().shutdown(sockets)


class HttpServer:
    """A running HTTP server of one application on one socket. `serve_http` creates it."""

    def __init__(
        self, server: uvicorn.Server, task: asyncio.Task[None], port: int, limits: ConnectionLimits
    ) -> None:
        self._server = server
        self.limits = limits
        """Limits on the number and the memory of the connections of the server's port."""
        self._task = task
        self._looking: asyncio.Task[None] | None = None
        self._allow(BoundedHttp.stalled_s)
        task.add_done_callback(lambda _: self._allow(None))
        self.port = port
        """TCP port on which the server listens."""

    @property
    def connections(self) -> list[BoundedHttp]:
        """List of the open connections of the server."""
        return [each for each in self._server.server_state.connections if isinstance(each, BoundedHttp)]

    async def stop(self) -> None:
        """Stop listening, and finish running requests within the graceful time-out. Idempotent.

        A client that reads nothing does not use up that time, because its connection is closed earlier.
        """
        self._server.should_exit = True
        if not self._task.done():
            grace_s = self._server.config.timeout_graceful_shutdown or 0
            self._allow(min(BoundedHttp.stalled_s, STALLED_AT_END_S, grace_s * PART_OF_GRACE))
        await asyncio.gather(self._task, return_exceptions=True)

    def _allow(self, stalled_s: float | None) -> None:
        """Start to close connections whose client reads nothing for `stalled_s` seconds. None stops these
        checks."""
        if self._looking is not None:
            self._looking.cancel()
        self._looking = None if stalled_s is None else asyncio.create_task(self._end_stalled(stalled_s))

    async def _end_stalled(self, stalled_s: float) -> None:
        while True:
            for connection in self.connections:
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
    """Serve `app` on a socket from `bind_port`. Return once the server accepts requests.

    The server owns the socket from now on.
    `graceful_timeout_s`: longest wait of `stop` for running requests before it cancels them, seconds.
    `tls`: certificate files, or None for plain HTTP.
    `hosts`: host names under which requests may call the server. By default any name is allowed, except on a
    loopback address, where a client may be a web page.
    `connections`: counter of closed connections.
    `answers_refusals`: whether the application answers refused requests itself (`http_refusals`).
    `keep_alive_s`: longest idle time of a connection between two requests, seconds.
    `connections_max`: most connections at a time.
    Raises RuntimeError if the server does not start, and StartupError for certificates that cannot be used.
    """
    port = port_of(sock)
    # Inherited by each connection. Over TLS the process cannot see that a reply waits for its client.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(BoundedHttp.stalled_s * 1000))
    port_refusals = PortRefusals(
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
        config.ssl = renewing(tls)  # uvicorn's own would never renew its certificate
    connections = connections or ClosedConnections(CollectorRegistry())
    limits = ConnectionLimits(connections, connections_max)
    server = _Server(config, sock, port_refusals, connections, limits)
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
    return HttpServer(server, task, port, limits)
