"""Tests of the bootstrap's probe that says up to when it has accepted all calls, also over TLS."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.bootstrap import accept_probe as module
from baton.bootstrap.accept_probe import DEAF_S, AcceptProbe
from baton.runtime.reachability import local_address_of
from baton.runtime.setting_kinds import join_address
from baton.wire.channel import Channels, Server
from baton.wire.service_role import ServiceRole
from baton.wire.tls_identity import Identity
from tests.safety.certificates import made, of
from tests.support.manual_clock import ManualClock
from tests.wire.servers import channel_to, has_ipv6, until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.001)
    monkeypatch.setattr(module, "AGAIN_S", 0.001)


@asynccontextmanager
async def running(hearing: AcceptProbe) -> AsyncIterator[None]:
    task = asyncio.create_task(hearing.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("certified", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::", "localhost"])
async def test_it_hears_itself_wherever_it_listens(host: str, certified: bool, tmp_path: Path) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback address (::1)")
    identity = Identity(of(made(tmp_path / "certs"), "bootstrap")) if certified else None
    server, channels, clock = Server(identity), Channels.showing(identity), ManualClock(5)
    address = join_address(local_address_of(host), server.bind(host, 0))
    await server.start(())
    hearing = AcceptProbe(lambda: channels.to(address, ServiceRole.BOOTSTRAP), lambda: server.accepted, clock)
    async with running(hearing):
        clock.advance(100)
        await until(lambda: hearing.accepted_until_ms() == 105)
        clock.advance(1)
        await until(lambda: hearing.accepted_until_ms() == 106)
    await channels.close()
    await server.stop(0)


async def test_live_is_not_lost_what_came_while_a_call_was_under_way_is_not_said_to_be_heard() -> None:
    clock, calls = ManualClock(5), list[asyncio.Event]()

    class Slow:
        """A channel whose calls wait for their own event."""

        def unary_unary(self, *_: Any, **__: Any) -> Any:
            async def call(*_: Any, **__: Any) -> None:
                calls.append(asyncio.Event())
                await calls[-1].wait()

            return call

        unary_stream = unary_unary

    accepted = 0
    hearing = AcceptProbe(Slow, lambda: accepted, clock)
    async with running(hearing):
        for number in range(3):
            await until(lambda number=number: len(calls) == number + 1)  # type: ignore[misc]
            sent_ms = clock.now_ms()
            clock.advance(4_000)
            assert hearing.accepted_until_ms() == max(sent_ms - 4_000, 5)
            accepted += 1
            calls[number].set()
            await until(lambda sent_ms=sent_ms: hearing.accepted_until_ms() == sent_ms)  # type: ignore[misc]


async def test_live_is_not_lost_a_call_that_others_were_accepted_beside_says_nothing() -> None:
    """The probe's call may have overtaken calls that still wait, so it proves nothing about them."""
    server, channels, clock = Server(), Channels(), ManualClock(5)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start(())
    looks, others = 0, 3

    def accepted() -> int:
        nonlocal looks
        looks += 1
        return server.accepted + min(looks, others)

    hearing = AcceptProbe(lambda: channels.to(address, ServiceRole.BOOTSTRAP), accepted, clock)
    async with running(hearing):
        clock.advance(100)
        await until(lambda: looks > others)
        await until(lambda: hearing.accepted_until_ms() == 105)
        others = 1 << 30
        await asyncio.sleep(0)
        clock.advance(100)
        seen = looks
        await until(lambda: looks > seen + 6)
        assert hearing.accepted_until_ms() == 105
        clock.advance(int(DEAF_S * 1000))
        await until(lambda: hearing.accepted_until_ms() > 105)  # bounded: it would keep the dead for ever
    await channels.close()
    await server.stop(0)


async def test_one_that_does_not_hear_itself_says_so_once_and_goes_by_the_clock(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    clock, address = ManualClock(5), "127.0.0.1:1"
    server, open_ = Server(), Channels()
    port = server.bind("127.0.0.1", 0)
    await server.start(())
    async with channel_to(address) as nowhere:
        way: list[grpc.aio.Channel] = [nowhere]
        hearing = AcceptProbe(lambda: way[0], lambda: 0, clock)
        async with running(hearing):
            clock.advance(int(DEAF_S * 1000) - 1)
            await asyncio.sleep(0.05)
            assert hearing.accepted_until_ms() == 5
            clock.advance(1)
            await until(lambda: hearing.accepted_until_ms() == clock.now_ms())
            clock.advance(1_000)
            assert hearing.accepted_until_ms() == clock.now_ms()
            way[0] = open_.to(f"127.0.0.1:{port}", ServiceRole.BOOTSTRAP)
            clock.advance(7)
            sent_ms = clock.now_ms()
            await until(lambda: not hearing.is_deaf)
            clock.advance(7)
            assert hearing.accepted_until_ms() == sent_ms
    assert [record.getMessage() for record in caplog.records] == [
        "the bootstrap does not hear itself: leases run out by the clock"
    ]
    await open_.close()
    await server.stop(0)
