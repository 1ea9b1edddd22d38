"""How far has the bootstrap heard what was said to it?

A call that came waits in a queue of the bootstrap's own until the event loop accepts it, and a busy loop
accepts late. So the bootstrap calls itself, through the same queue: once such a call is answered, everything
that had come before it was sent has been accepted. Silence counts up to there (`live-is-not-lost`).
"""

import asyncio
from collections.abc import Callable
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.clock import Clock
from services.runtime.logging import Log

log = Log(__name__)

EVERY_S: Final = 0.25
DEAF_S: Final = 30.0
"""How long it may hear nothing of itself: a busy loop is not, for so long. Then it goes by the clock, or it
would keep the dead for ever."""


class Hearing:
    """Runs as one task."""

    def __init__(self, channel: Callable[[], grpc.aio.Channel], clock: Clock) -> None:
        """`channel`: to this process's own server, asked before each call."""
        self._channel = channel
        self._clock = clock
        self._heard_ms = clock.now_ms()
        self._deaf = False

    def heard_ms(self) -> int:
        """Whatever came before then was accepted, on the clock's monotonic reading."""
        return self._clock.now_ms() if self._deaf else self._heard_ms

    async def run(self) -> None:
        """Listen until cancelled."""
        while True:
            sent_ms = self._clock.now_ms()
            stub = health_pb2_grpc.HealthStub(self._channel())
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEAF_S)
            except grpc.aio.AioRpcError as error:
                self._missed(error)
            else:
                self._heard_ms, self._deaf = sent_ms, False
            await asyncio.sleep(EVERY_S)

    def _missed(self, error: grpc.aio.AioRpcError) -> None:
        silent_s = (self._clock.now_ms() - self._heard_ms) / 1000
        if silent_s >= DEAF_S and not self._deaf:
            self._deaf = True
            cause = error.details() or error.code().name
            log.warning("the bootstrap does not hear itself: leases run out by the clock", cause=cause)
