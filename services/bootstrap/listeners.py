"""HTTP listeners of the router, and which callers each of them admits.

The API's port checks API keys and the rate limit. The pages for operators are on a port of their own, or on
the API's port. On the API's port, they need an admin key. Without admin keys, they are open if there is one
API key at most, or with --open-admin. A port of their own checks admin keys, or no keys. Without keys its
address protects it, which is this machine's loopback by default.
"""

import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp

from baton.api.http.authentication import AccessControl
from baton.api.http.cors import open_to
from baton.api.http.middleware import ApiMiddleware
from baton.api.http.rate_limit import RateLimit
from baton.bootstrap.settings import BootstrapSettings
from baton.runtime.listening_ports import bind_port, reserve_port, start_listening
from baton.runtime.logging import Log
from baton.runtime.reachability import is_reachable_from_elsewhere
from baton.runtime.tls_files import TlsFiles
from baton.web.api_keys import ADMIN_FILE_FLAG, FILE_FLAG, ApiKeys
from baton.web.closed_connections import ClosedConnections
from baton.web.host_names import ANY_NAME, HostNames
from baton.web.http_server import HttpServer, serve_http

log = Log(__name__)

PAGES_S: Final = 2
"""Longest time in seconds for running requests on the operators' port to end at shutdown."""


@dataclass(frozen=True, slots=True)
class HttpServers:
    """Running HTTP servers: of the API's port, and of the operators' port if there is one."""

    api: HttpServer
    pages: HttpServer | None

    @property
    def port(self) -> int:
        return self.api.port

    @property
    def admin_port(self) -> int | None:
        return None if self.pages is None else self.pages.port

    async def stop(self) -> None:
        """Stop both servers after their running requests. The operators' port is served as long as the
        API."""
        await self.api.stop()
        if self.pages is not None:
            await self.pages.stop()


@dataclass(frozen=True, slots=True)
class HttpListeners:
    """Open sockets of the HTTP ports, with the access rules of each. They are opened before the slow part of
    a start, so that wrong settings fail first."""

    api: AccessControl
    admin: AccessControl
    """Access rules (API keys) of the operators' port, if they have a port of their own."""
    apart: bool
    """Whether the pages for operators have a port of their own."""
    _sockets: tuple[socket.socket, ...]
    _hosts: tuple[HostNames | None, ...]
    """Host names by which each port may be called. None if the port's address decides: any name, or on a
    loopback address only this machine's names."""
    _tls: TlsFiles | None
    _origins: tuple[str, ...]
    """Origins whose web pages may call the API's port from a browser (CORS)."""
    _keep_alive_s: float
    """Longest time in seconds for which a connection may be idle between two requests."""
    _connections_max: int
    """Most connections of each port at one time."""
    _is_shared: bool
    """Whether other bootstraps listen on the API's port, too."""

    def close(self) -> None:
        """Close the sockets, if start-up failed before they were served."""
        for each in self._sockets:
            each.close()

    async def serve(
        self,
        api: ApiMiddleware,
        pages: Callable[[], ApiMiddleware],
        graceful_s: int,
        connections: ClosedConnections,
        until_ready: Callable[[], Awaitable[None]] | None = None,
    ) -> HttpServers:
        """Serve both ports. `pages`: makes the app of the operators' own port. `graceful_s`: time for running
        requests at shutdown, in seconds.

        `until_ready`: waits until requests can be served. A port that other bootstraps share takes no
        connection before, since another one may serve it.
        """
        second = await self._serve(1, pages(), PAGES_S, connections) if self.apart else None
        if self._is_shared:
            if until_ready is not None:
                await until_ready()
            start_listening(self._sockets[0])
        return HttpServers(await self._serve(0, open_to(api, self._origins), graceful_s, connections), second)

    async def _serve(
        self, which: int, app: ASGIApp, graceful_s: int, connections: ClosedConnections
    ) -> HttpServer:
        return await serve_http(
            app,
            self._sockets[which],
            graceful_s,
            self._tls,
            hosts=self._hosts[which],
            connections=connections,
            answers_refusals=True,
            keep_alive_s=self._keep_alive_s,
            connections_max=self._connections_max,
        )


def open_listeners(settings: BootstrapSettings) -> HttpListeners:
    """Open the HTTP listeners that `settings` demand. Raises StartupError for keys or certificates that
    cannot be used, and for a port that is taken."""
    keys = _keys(settings.api_keys, settings.api_key_file, FILE_FLAG)
    admin_keys = _keys(settings.admin_api_keys, settings.admin_api_key_file, ADMIN_FILE_FLAG)
    rate = RateLimit(settings.rate_limit) if settings.rate_limit else None
    tls = settings.http_tls
    if tls is not None:
        tls.context()
    bind = partial(reserve_port, is_shared=True) if settings.reuse_port else bind_port
    sockets = [bind(settings.host, settings.http_port, "--http-port")]
    if settings.admin_port is not None:
        sockets.append(bind_port(settings.admin_host, settings.admin_port, "--admin-port"))
    _warn(settings, keyless=keys is None, admin_keyless=admin_keys is None)
    named = HostNames(settings.allowed_host, any_name=False) if settings.allowed_host else None
    # A web page has no key. If no keys are needed, the port's address decides.
    hosts = tuple(named or (None if each is None else ANY_NAME) for each in (keys, admin_keys))
    log.info(
        "rights of callers",
        api_keys="none" if keys is None else "several" if keys.several else "one",
        prefixes=_prefixes(settings, keys),
        operator_pages=_operator_pages(settings, keys, admin_keys),
    )
    api = AccessControl(
        keys,
        rate,
        admin_keys,
        open_admin=settings.open_admin,
        share_prefixes=settings.share_prefix_cache,
    )
    admin = AccessControl(admin_keys=admin_keys, open_metrics=True)
    return HttpListeners(
        api,
        admin,
        len(sockets) > 1,
        tuple(sockets),
        hosts,
        tls,
        settings.cors_origins,
        settings.http_keep_alive_ms / 1000,
        settings.max_connections,
        settings.reuse_port,
    )


def _keys(given: Sequence[str], file: str, flag: str) -> ApiKeys | None:
    """Return the API keys from the environment (`given`) and from a file (`file`: its path). None if neither
    is given. Raises StartupError."""
    return ApiKeys(given, Path(file) if file else None, flag=flag) if given or file else None


def _prefixes(settings: BootstrapSettings, keys: ApiKeys | None) -> str:
    """Return a text for the log that says which callers share cached prefixes."""
    if keys is None or not keys.several:
        return "shared by all callers"
    return (
        "shared by all keys (--share-prefix-cache)" if settings.share_prefix_cache else "shared within a key"
    )


def _operator_pages(settings: BootstrapSettings, keys: ApiKeys | None, admin_keys: ApiKeys | None) -> str:
    """Return a text for the log that says who may read the pages for operators."""
    if admin_keys is not None:
        return "admin keys"
    if settings.admin_port is not None:
        return "whoever reaches --admin-port"
    if keys is None:
        return "whoever reaches the API"
    if settings.open_admin:
        return "every API key (--open-admin)"
    if keys.several:
        return "nobody: set --admin-api-key-file, --admin-port or --open-admin"
    return "the API key"


def _warn(settings: BootstrapSettings, *, keyless: bool, admin_keyless: bool) -> None:
    """Log a warning for each port that is open to callers that were probably not intended."""
    if keyless and "*" in settings.cors_origins:
        log.warning("any web page that somebody here opens may ask the API: no API keys are set")
    host, grpc_host, admin_host = settings.host, settings.grpc_host, settings.admin_host
    if is_reachable_from_elsewhere(host):
        if keyless:
            log.warning("the API is open to whoever reaches it: no API keys are set", host=host)
        if settings.http_tls is None:
            log.warning("the API is plain HTTP: --http-tls-cert is not set", host=host)
    if settings.tls is None and is_reachable_from_elsewhere(grpc_host):
        log.warning("gRPC is plain and open to whoever reaches it: --tls-cert is not set", host=grpc_host)
    if settings.admin_port is not None and admin_keyless and is_reachable_from_elsewhere(admin_host):
        log.warning("the pages for operators are open to whoever reaches them", host=admin_host)
