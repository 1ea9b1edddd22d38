"""How does a thread whose event loop is not grpc.aio's call another service?

One loop of a process has grpc.aio, whose one poller serves no second loop well. This has the face of its
channel, as far as unary calls need it, over gRPC's synchronous one, which any thread may use.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import grpc


class ThreadChannel:
    """Used from the one event loop of its thread."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def unary_unary(self, method: str, **how: Any) -> Callable[..., Coroutine[Any, Any, Any]]:
        """`how`: as generated stubs say it."""
        calling = self._channel.unary_unary(method, **how)

        def call(request: Any, timeout: float | None = None) -> Coroutine[Any, Any, Any]:
            return _answered(calling.future(request, timeout=timeout))

        return call

    def get_state(self) -> grpc.ChannelConnectivity:
        """As one that would connect for its next call: to do so costs little, and it takes the place of one
        with another certificate at once."""
        return grpc.ChannelConnectivity.IDLE

    async def close(self, grace_s: float = 0.0) -> None:
        """Calls that are under way may end within `grace_s`."""
        try:
            await asyncio.sleep(grace_s)
        finally:
            self._channel.close()


async def _answered(call: grpc.Future) -> Any:
    """The reply to a call that another thread of gRPC's carries. Raises grpc.RpcError."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def tell(_: grpc.Future) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody waits
            loop.call_soon_threadsafe(_end, ended)

    call.add_done_callback(tell)
    try:
        await ended
    finally:
        call.cancel()
    return call.result()


def _end(ended: "asyncio.Future[None]") -> None:
    if not ended.done():
        ended.set_result(None)
