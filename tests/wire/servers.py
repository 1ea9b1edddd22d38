"""Real gRPC servers within the test's own event loop, and a way to wait that cannot hang."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

from baton.wire.channel import Server, open_channel
from baton.wire.service_role import ServiceRole
from baton.wire.tls_identity import Identity
from tests.patience import PATIENCE_S


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def until(holds: Callable[[], bool]) -> None:
    """Let the event loop run until `holds`. TimeoutError if it never does."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(
    add: Callable[[grpc.aio.Server], None], port: int = 0, identity: Identity | None = None
) -> AsyncIterator[str]:
    """Serve the services that `add` adds, on `port` or any. Yields the address."""
    server = Server(identity)
    add(server.grpc)
    address = f"127.0.0.1:{server.bind('127.0.0.1', port)}"
    await server.start(())
    try:
        yield address
    finally:
        await server.stop(0)


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    channel = open_channel(address, ServiceRole.BOOTSTRAP)
    try:
        yield channel
    finally:
        await channel.close()
