"""How far has the bootstrap heard what was said to it?

A call that came waits in a queue of gRPC's own until the event loop accepts it, and a busy loop accepts late.
So the bootstrap calls itself. That call takes its chance among those that wait, and may overtake them: it
takes several rounds of the loop, in each of which one that waits is accepted. Where none was, none waited:
everything that had come before it was sent is heard. Silence counts up to there (`live-is-not-lost`).
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
"""After a call that others were accepted beside."""
DEAF_S: Final = 30.0
"""How long it may hear nothing of itself, or never be alone: a loop is not so busy for so long. Then it goes
by the clock, or by any answer: it would keep the dead for ever."""


class AcceptProbe:
    """Runs as one task."""

    def __init__(
        self, channel: Callable[[], grpc.aio.Channel], accepted: Callable[[], int], clock: Clock
    ) -> None:
        """`channel`: to this process's own server, asked before each call. `accepted`: how many calls that
        server has accepted."""
        self._channel = channel
        self._accepted = accepted
        self._clock = clock
        self._heard_ms = clock.now_ms()
        self._deaf = False

    def accepted_until_ms(self) -> int:
        """Whatever came before then was accepted, on the clock's monotonic reading."""
        return self._clock.now_ms() if self._deaf else self._heard_ms

    async def run(self) -> None:
        """Listen until cancelled."""
        while True:
            sent_ms, before = self._clock.now_ms(), self._accepted()
            stub = health_pb2_grpc.HealthStub(self._channel())
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEAF_S)
            except grpc.aio.AioRpcError as error:
                self._missed(error)
                await asyncio.sleep(EVERY_S)
                continue
            self._deaf = False
            alone = self._accepted() - before <= 1
            if alone or sent_ms - self._heard_ms >= DEAF_S * 1000:
                self._heard_ms = sent_ms
            await asyncio.sleep(EVERY_S if alone else AGAIN_S)

    def _missed(self, error: grpc.aio.AioRpcError) -> None:
        silent_s = (self._clock.now_ms() - self._heard_ms) / 1000
        if silent_s >= DEAF_S and not self._deaf:
            self._deaf = True
            cause = error.details() or error.code().name
            log.warning("the bootstrap does not hear itself: leases run out by the clock", cause=cause)
