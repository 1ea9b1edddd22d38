"""Probe that finds out whether a process still answers at its address.

An answer proves that the process lives. No answer proves nothing (`proof-not-time`): a process that is
stopped or cut off answers no call, and may write later. An answer from another process at the address proves
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
"""Longest time for a probe, in seconds. The reporter of a worker's exit waits twice as long for
its answer."""
SERVICE: Final = "baton.v1.PresenceService"


async def is_listening(address: str) -> bool:
    """Return whether any process accepts connections at host:port.

    Raises OSError if that cannot be known, for example without a route or if the name does not resolve.
    """
    try:
        _, writer = await asyncio.open_connection(*split_address(address))
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


class LivenessProbe:
    """Probe that finds out whether a certain process still answers, by asking it over gRPC for its
    incarnation."""

    def __init__(
        self, channels: Channels, listening: Callable[[str], Awaitable[bool]] = is_listening
    ) -> None:
        self._channels = channels
        self._listening = listening

    async def answers(self, address: str, party: ServiceRole, incarnation: Incarnation) -> bool:
        """Return whether the process with this incarnation answers at `address` within ASK_S seconds."""
        try:
            async with asyncio.timeout(ASK_S):
                if not await self._listening(address):
                    return False
                # Channels to a silent worker are dropped, which would leave calls over them unanswered.
                async with self._channels.once(address, party) as channel:
                    stub = workers_pb2_grpc.PresenceServiceStub(channel)
                    request = workers_pb2.WhoIsThereRequest()
                    reply = await stub.WhoIsThere(request, timeout=ASK_S, wait_for_ready=True)
        except (OSError, grpc.aio.AioRpcError):  # TimeoutError is an OSError
            return False
        return bool(reply.incarnation == incarnation)


class PresenceService(workers_pb2_grpc.PresenceServiceServicer):
    """gRPC service that answers liveness probes with this process's incarnation."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation

    async def WhoIsThere(
        self, request: workers_pb2.WhoIsThereRequest, context: grpc.aio.ServicerContext
    ) -> workers_pb2.WhoIsThereReply:
        del request, context
        return workers_pb2.WhoIsThereReply(incarnation=self._incarnation)
