"""Set-up of gRPC servers and client channels, with the same options in all processes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.ids import Incarnation
from baton.runtime.setting_kinds import join_address
from baton.wire.errors import WrongIncarnation
from baton.wire.message_limits import TAKEN_BYTES_MAX
from baton.wire.method_authorization import AuthorizationInterceptor
from baton.wire.run_token import TokenChannel, TokenInterceptor
from baton.wire.service_role import ServiceRole
from baton.wire.thread_channel import ThreadChannel
from baton.wire.tls_identity import Identity
from baton.wire.undecodable_requests import UndecodableInterceptor

UNARY_S: Final = 5.0
"""Deadline in seconds of a call that the server answers from its tables at once."""

LAST_CALLS_S: Final = 2 * UNARY_S
"""Seconds for which running calls may go on over a channel that was replaced, or is needed no more."""

REPLY_BYTES_MAX: Final = 32 * 1024 * 1024
"""Longest gRPC message that a client accepts as a reply, in bytes."""

REQUEST_BYTES_MAX: Final = TAKEN_BYTES_MAX
"""Longest gRPC message that a server accepts, in bytes. Reading a longer one would delay its turns and its
lease for seconds."""

AHEAD_BYTES: Final = 8 * 1024
"""Flow-control window in bytes: how much a peer may send before the receiver reads it. A longer message is
sent when it is read.

It is small, so that a slow client gets few long messages and not many short ones. Each message costs as much
as several tokens. A worker that cannot send collects the tokens of its rooms meanwhile.
"""

_KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
# gRPC must not retry calls by itself, because that could open a room id twice. The backoff is short because
# workers restart on the same address and are called again at once.
_CHANNEL: Final = (
    *_KEEPALIVE,
    ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
    ("grpc.max_send_message_length", REQUEST_BYTES_MAX),
    ("grpc.http2.lookahead_bytes", AHEAD_BYTES),
    ("grpc.http2.bdp_probe", 0),  # which would raise it to the connection's bandwidth
    ("grpc.enable_retries", 0),
    # gRPC would send calls between the services through the platform's HTTP proxy.
    ("grpc.enable_http_proxy", 0),
    # No state of another channel to this address (an earlier process, a back-off) is shared.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name this is the time that one attempt to connect may take. A busy peer needs some.
    ("grpc.min_reconnect_backoff_ms", 3_000),
)
# Above its default of about 1,000 pending calls a server drops some silently as CANCELLED.
_SERVER: Final = (
    *_KEEPALIVE,
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    ("grpc.max_send_message_length", REPLY_BYTES_MAX),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
)


def open_channel(
    address: str, party: ServiceRole, identity: Identity | None = None, run_token: str = ""
) -> grpc.aio.Channel:
    """Open a gRPC channel to the process at `address`, which has the role `party`.

    `identity`: this process's certificate, or None for plain text. With one, the server has to prove its
    role. `run_token`: token to send with each call, or empty.
    """
    return _open(grpc.aio, address, party, identity, run_token)


def open_thread_channel(
    address: str, party: ServiceRole, identity: Identity | None = None, run_token: str = ""
) -> ThreadChannel:
    """Open a gRPC channel for a thread with its own event loop. See `open_channel` for the arguments."""
    return ThreadChannel(_open(grpc, address, party, identity, run_token))


def _open(library: Any, address: str, party: ServiceRole, identity: Identity | None, run_token: str) -> Any:
    if identity is None:
        channel = library.insecure_channel(address, options=_CHANNEL)
    else:
        options = (*_CHANNEL, ("grpc.ssl_target_name_override", party.tls_name))
        channel = library.secure_channel(address, identity.channel(), options=options)
    return TokenChannel(channel, run_token) if run_token else channel


class _CountAccepted(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Interceptor that counts the calls which the event loop has accepted. Other calls wait in gRPC's own
    queue."""

    def __init__(self) -> None:
        self.count = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        self.count += 1
        return await continuation(details)


class Server:
    """A gRPC server with health and reflection services. The caller adds its own services before `start`."""

    def __init__(self, identity: Identity | None = None, run_token: str = "") -> None:
        """Make a server. `identity`: with one, callers have to show a certificate. `run_token`: if not empty,
        callers have to send that token."""
        self._identity = identity
        ask = (TokenInterceptor(run_token),) if run_token else ()
        admit = () if identity is None else (AuthorizationInterceptor(),)
        self._count = _CountAccepted()
        interceptors = (self._count, *ask, *admit, UndecodableInterceptor())
        self.grpc = grpc.aio.server(interceptors=interceptors, options=_SERVER)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        self._names: list[str] = []

    @property
    def accepted(self) -> int:
        """Number of calls that the event loop has accepted so far."""
        return self._count.count

    def bind(self, host: str, port: int) -> int:
        """Listen on `host:port`. Return the port, which the system picks for port 0. Raises OSError if it is
        taken."""
        address = join_address(host, port)
        try:
            if self._identity is None:
                bound = self.grpc.add_insecure_port(address)
            else:
                bound = self.grpc.add_secure_port(address, self._identity.server())
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}") from error
        if bound == 0:
            raise OSError(f"cannot listen on {address}")
        return int(bound)

    async def start(self, services: Iterable[str]) -> None:
        """Start to serve, with health NOT_SERVING at first. `services`: full names, for reflection and
        health."""
        self._names = list(services)
        names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)
        await self.grpc.start()
        await self.set_serving(serving=False)

    async def set_serving(self, *, serving: bool) -> None:
        state = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._names):
            await self._health.set(name, state)

    async def stop(self, grace_s: float) -> None:
        await self.set_serving(serving=False)
        await self.grpc.stop(grace_s)


@dataclass(frozen=True, slots=True)
class _Way:
    """Where one channel leads: to an address, and to one process or any process there."""

    address: str
    incarnation: Incarnation | None
    """Process that the channel is for, by its incarnation. None for any process at the address."""


class Channels:
    """Client channels of one process, one for each process that it calls.

    A channel is opened at first use. It is closed together with the others, or when the called process is
    gone.
    """

    def __init__(
        self,
        opener: Callable[[str, ServiceRole], grpc.aio.Channel] = open_channel,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        """Make an empty set of channels.

        `opener`: opens a channel. `version`: returns the version of the credentials that `opener` uses.
        """
        self._opener = opener
        self._version = version
        self._open: dict[_Way, grpc.aio.Channel] = {}
        self._opened_with: dict[_Way, int] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @staticmethod
    def showing(
        identity: Identity | None,
        run_token: str = "",
        opener: Callable[..., grpc.aio.Channel] = open_channel,
    ) -> "Channels":
        """Return channels that authenticate with these credentials: a certificate, a run token, both or
        neither."""
        way = partial(opener, identity=identity, run_token=run_token)
        return Channels(way) if identity is None else Channels(way, identity.version)

    def to(
        self, address: str, party: ServiceRole, incarnation: Incarnation | None = None
    ) -> grpc.aio.Channel:
        """Return the gRPC channel to a process, which is opened if there is none. `party`: the role of the
        process at that address.

        A new channel replaces one with older credentials if that would have to connect anew.
        """
        way, version = _Way(address, incarnation), self._version()
        if self._opened_with.get(way, version) != version and _unconnected(self._open[way]):
            self._retire(way)
        if way not in self._open:
            self._open[way] = self._opener(address, party)
            self._opened_with[way] = version
        return self._open[way]

    @asynccontextmanager
    async def once(self, address: str, party: ServiceRole) -> AsyncIterator[grpc.aio.Channel]:
        """Yield a new gRPC channel for this caller alone, which no other code closes."""
        channel = self._opener(address, party)
        try:
            yield channel
        finally:
            await channel.close()

    def __len__(self) -> int:
        """Return the number of open channels."""
        return len(self._open)

    def incarnations(self) -> set[Incarnation]:
        """Return the incarnations of the processes to which a channel is open."""
        return {way.incarnation for way in self._open if way.incarnation is not None}

    async def drop(self, incarnation: Incarnation) -> None:
        """Close the channels to a process. Calls that run over them are cancelled."""
        for way in [each for each in self._open if each.incarnation == incarnation]:
            await self._drop(way)

    def drop_address(self, address: str) -> None:
        """Close the channel to any process at `address`, if there is one, after the calls that run over
        it."""
        if (way := _Way(address, None)) in self._open:
            self._retire(way)

    async def close(self) -> None:
        for way in list(self._open):
            await self._drop(way)
        for closing in self._closing:
            closing.cancel()

    def _retire(self, way: _Way) -> None:
        """Forget a channel, and close it after the calls that run over it, at most LAST_CALLS_S later."""
        self._opened_with.pop(way, None)
        closing = asyncio.ensure_future(self._open.pop(way).close(LAST_CALLS_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _drop(self, way: _Way) -> None:
        channel = self._open.pop(way, None)
        self._opened_with.pop(way, None)
        if channel is not None:
            await channel.close()


def _unconnected(channel: grpc.aio.Channel) -> bool:
    """Return whether a channel has no connection and would make one for its next call."""
    return channel.get_state() in (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.TRANSIENT_FAILURE)


def check_incarnation(mine: Incarnation, named: int) -> None:
    """Raise WrongIncarnation if a message names another incarnation than `mine`, this process's own."""
    if named != mine:
        raise WrongIncarnation(f"meant for incarnation {named}, this is {mine}")
