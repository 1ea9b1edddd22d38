"""Probe of whether a process still answers at its address.

An answer proves that the process lives. No answer proves nothing (`proof-not-time`): a process that was
stopped or cut off answers no call, and may write later. The answer of another process at its address proves
nothing, either.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import grpc

from baton.ids import Incarnation
from baton.runtime.setting_kinds import split_address
from baton.wire.baton.v1 import workers_pb2, workers_pb2_grpc
from baton.wire.channel import Channels
from baton.wire.service_role import ServiceRole

ASK_S: Final = 1.0
"""Longest time for a probe, in seconds. A reporter of an exit waits for twice as long."""
SERVICE: Final = "baton.v1.PresenceService"


async def is_listening(address: str) -> bool:
    """Return whether any process accepts connections at host:port. Raises OSError if that cannot be known: no
    route, or no such name."""
    try:
        _, writer = await asyncio.open_connection(*split_address(address))
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


class LivenessProbe:
    """Probes processes by a call."""

    def __init__(
        self, channels: Channels, listening: Callable[[str], Awaitable[bool]] = is_listening
    ) -> None:
        self._channels = channels
        self._listening = listening

    async def answers(self, address: str, party: ServiceRole, incarnation: Incarnation) -> bool:
        """Return whether that very process answers at `address` within ASK_S."""
        try:
            async with asyncio.timeout(ASK_S):
                if not await self._listening(address):
                    return False
                # Ways to a worker that is silent are dropped, and what is asked by them is never answered.
                async with self._channels.once(address, party) as channel:
                    stub = workers_pb2_grpc.PresenceServiceStub(channel)
                    request = workers_pb2.WhoIsThereRequest()
                    reply = await stub.WhoIsThere(request, timeout=ASK_S, wait_for_ready=True)
        except (OSError, grpc.aio.AioRpcError):  # TimeoutError is an OSError
            return False
        return bool(reply.incarnation == incarnation)


class PresenceService(workers_pb2_grpc.PresenceServiceServicer):
    """Answers probes of this process."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation

    async def WhoIsThere(
        self, request: workers_pb2.WhoIsThereRequest, context: grpc.aio.ServicerContext
    ) -> workers_pb2.WhoIsThereReply:
        del request, context
        return workers_pb2.WhoIsThereReply(incarnation=self._incarnation)
