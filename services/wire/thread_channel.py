"""gRPC channel for a thread whose event loop is not grpc.aio's.

One loop of a process has grpc.aio, whose single poller serves no second loop well. This class has the
interface of its channel for unary calls, over gRPC's synchronous channel, which any thread may use.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import grpc


class ThreadChannel:
    """Unary calls from the one event loop of a thread."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def unary_unary(self, method: str, **how: Any) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return the caller of a method. `how`: arguments of generated stubs."""
        calling = self._channel.unary_unary(method, **how)

        def call(request: Any, timeout: float | None = None) -> Coroutine[Any, Any, Any]:
            return _answered(calling.future(request, timeout=timeout))

        return call

    def get_state(self) -> grpc.ChannelConnectivity:
        """Return IDLE, the state of a channel that would connect for its next call. Opening another channel
        is cheap, and one with a new certificate is used at once."""
        return grpc.ChannelConnectivity.IDLE

    async def close(self, grace_s: float = 0.0) -> None:
        """Close the channel. Running calls may end within `grace_s` seconds."""
        try:
            await asyncio.sleep(grace_s)
        finally:
            self._channel.close()


async def _answered(call: grpc.Future) -> Any:
    """Return the reply to a call that runs on one of gRPC's threads. Raises grpc.RpcError."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def notify(_: grpc.Future) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody waits
            loop.call_soon_threadsafe(_end, ended)

    call.add_done_callback(notify)
    try:
        await ended
    finally:
        call.cancel()
    return call.result()


def _end(ended: "asyncio.Future[None]") -> None:
    if not ended.done():
        ended.set_result(None)
