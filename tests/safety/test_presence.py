"""Tests that a live process is recognised as alive, with and without certificates."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from baton.ids import Incarnation
from baton.wire import liveness as module
from baton.wire.baton.v1 import workers_pb2_grpc
from baton.wire.channel import Channels, Server
from baton.wire.liveness import LivenessProbe, PresenceService
from baton.wire.service_role import ServiceRole
from baton.wire.tls_identity import Identity
from tests.safety.certificates import of

MINE: Final = Incarnation(7)
OTHER: Final = Incarnation(8)
TLS: Final = pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])


@asynccontextmanager
async def answering(identity: Identity | None) -> AsyncIterator[str]:
    """A worker's address."""
    server = Server(identity)
    workers_pb2_grpc.add_PresenceServiceServicer_to_server(PresenceService(MINE), server.grpc)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start(())
    try:
        yield address
    finally:
        await server.stop(0)


@TLS
async def test_a_process_answers_and_another_at_its_address_is_not_that_process(
    ours: Path, secured: bool
) -> None:
    def identity(party: ServiceRole) -> Identity | None:
        return Identity(of(ours, party)) if secured else None

    channels = Channels.showing(identity(ServiceRole.BOOTSTRAP))
    asker = LivenessProbe(channels)
    async with answering(identity(ServiceRole.PREFILL)) as address:
        assert await asker.answers(address, ServiceRole.PREFILL, MINE)
        assert not await asker.answers(address, ServiceRole.PREFILL, OTHER)
    assert not await asker.answers(address, ServiceRole.PREFILL, MINE)
    await channels.close()


async def test_a_port_of_somebody_else_and_one_that_nobody_answers_at_are_no_answer(
    ours: Path, strangers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.3)
    channels = Channels.showing(Identity(of(ours, ServiceRole.BOOTSTRAP)))
    asker = LivenessProbe(channels)
    for somebody in (Identity(of(strangers, ServiceRole.PREFILL)), Identity(of(ours, ServiceRole.DECODE))):
        async with answering(somebody) as address:
            assert not await asker.answers(address, ServiceRole.PREFILL, MINE)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = f"127.0.0.1:{stopped.getsockname()[1]}"
        assert not await asker.answers(address, ServiceRole.PREFILL, MINE)
    assert not await asker.answers("no-such-host.invalid:1", ServiceRole.PREFILL, MINE)
    await channels.close()
