"""gRPC channel for a thread that has its own event loop, besides the loop that grpc.aio uses.

grpc.aio belongs to one event loop of a process, and its single poller does not serve a second loop well. This
class has the interface of a grpc.aio channel for unary calls. It works over gRPC's synchronous channel, which
any thread may use.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import grpc


class ThreadChannel:
    """Channel for unary calls from the event loop of a second thread."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def unary_unary(self, method: str, **how: Any) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return a callable for one unary method. `how`: keyword arguments that generated stubs pass."""
        calling = self._channel.unary_unary(method, **how)

        def call(request: Any, timeout: float | None = None) -> Coroutine[Any, Any, Any]:
            return _answered(calling.future(request, timeout=timeout))

        return call

    def get_state(self) -> grpc.ChannelConnectivity:
        """Return IDLE always, so that `Channels` replaces this channel as soon as there is a new certificate.

        Opening another channel is cheap.
        """
        return grpc.ChannelConnectivity.IDLE

    async def close(self, grace_s: float = 0.0) -> None:
        """Close the channel. Running calls may end within `grace_s` seconds."""
        try:
            await asyncio.sleep(grace_s)
        finally:
            self._channel.close()


async def _answered(call: grpc.Future) -> Any:
    """Wait for a call that runs on one of gRPC's threads, and return its reply. Raises grpc.RpcError."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def notify(_: grpc.Future) -> None:
        with suppress(RuntimeError):  # the loop was closed, so no task waits
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
