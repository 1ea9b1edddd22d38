"""Probe that measures up to which time the router has read the gRPC calls sent to it.

A call waits in gRPC's own queue until the event loop accepts it, and a busy loop accepts late. So the router
calls itself. That call takes several rounds of the loop, and each round accepts one waiting call. If no other
call was accepted meanwhile, none waited: all calls sent before it have been accepted. A worker counts as
silent only up to that time (`live-is-not-lost`).
"""

import asyncio
from collections.abc import Callable
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.runtime.clock import Clock
from baton.runtime.logging import Log

log = Log(__name__)

EVERY_S: Final = 0.25
AGAIN_S: Final = 0.02
"""Pause after a probe during which other calls were accepted, in seconds."""
DEAF_S: Final = 30.0
"""Longest time without a conclusive probe, in seconds; a loop is not busy for so long. After that, calls are
assumed to be accepted, since leases of dead workers would otherwise never end."""


class AcceptProbe:
    """Task in which the router calls itself regularly, to measure how late it accepts calls."""

    def __init__(
        self, channel: Callable[[], grpc.aio.Channel], accepted: Callable[[], int], clock: Clock
    ) -> None:
        """Make a probe. `channel`: returns the channel to this process's own server, before each call.
        `accepted`: returns the number of calls that the server has accepted."""
        self._channel = channel
        self._accepted = accepted
        self._clock = clock
        self._accepted_ms = clock.now_ms()
        self.is_deaf = False

    def accepted_until_ms(self) -> int:
        """Return the time before which all calls that were sent to the router have been accepted, in
        milliseconds of the monotonic clock."""
        return self._clock.now_ms() if self.is_deaf else self._accepted_ms

    async def run(self) -> None:
        """Call this process regularly, until cancelled."""
        while True:
            sent_ms, before = self._clock.now_ms(), self._accepted()
            stub = health_pb2_grpc.HealthStub(self._channel())
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEAF_S)
            except grpc.aio.AioRpcError as error:
                self._missed(error)
                await asyncio.sleep(EVERY_S)
                continue
            self.is_deaf = False
            alone = self._accepted() - before <= 1
            if alone or sent_ms - self._accepted_ms >= DEAF_S * 1000:
                self._accepted_ms = sent_ms
            await asyncio.sleep(EVERY_S if alone else AGAIN_S)

    def _missed(self, error: grpc.aio.AioRpcError) -> None:
        silent_s = (self._clock.now_ms() - self._accepted_ms) / 1000
        if silent_s >= DEAF_S and not self.is_deaf:
            self.is_deaf = True
            cause = error.details() or error.code().name
            log.warning("the bootstrap does not hear itself: leases run out by the clock", cause=cause)
