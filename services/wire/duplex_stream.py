"""Client side of a bidirectional gRPC stream, from its begin to its end.

Messages to send are collected until the stream can take one. So what many rooms send at one time travels
together. The caller decides what the end of the stream means.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import grpc

from baton.runtime.logging import Log
from baton.wire.errors import RemoteError, remote_error

log = Log(__name__)

ENDED: Final = "it ended the stream"


class ChannelClosed(RemoteError):
    """This process closed the stream's channel, because a new channel replaces it.

    It is no sign that the peer has failed.
    """


async def run_duplex(
    call: grpc.aio.StreamStreamCall,
    news: asyncio.Event,
    next_message: Callable[[], Any],
    on_message: Callable[[Any], None],
) -> RemoteError:
    """Run a bidirectional stream until it ends. Return a RemoteError that says why it ended.

    `next_message`: returns the next message to send, or None. It is called again when `news` is set.
    `on_message`: called with each received message. A bug in either ends the stream and is logged. The call
    is over when this returns or is cancelled.
    """
    ends: list[RemoteError] = []
    call.add_done_callback(lambda _: ends.append(_at_once(_end_of(call))))
    writer = asyncio.create_task(_write(call, news, next_message))
    try:
        async for message in call:
            on_message(message)
    except grpc.aio.AioRpcError as broke:
        # If a write fails because the peer ended the stream, grpc.aio replaces the peer's status by an error
        # of its own. The peer's status came first.
        return ends[0] if ends else remote_error(broke)
    except asyncio.CancelledError:
        if _called_off():
            raise
        return ChannelClosed(grpc.StatusCode.CANCELLED, "", "the channel was closed under the stream")
    except Exception as bug:
        log.error("a peer's stream could not be read", error=bug)  # noqa: TRY400
        return RemoteError(grpc.StatusCode.INTERNAL, "", f"the stream could not be read: {bug!r}")
    finally:
        call.cancel()  # grpc alone leaves some calls running, so that the peer never learns of the end
        writer.cancel()
    return RemoteError(grpc.StatusCode.OK, "", ENDED)


async def _end_of(call: grpc.aio.StreamStreamCall) -> RemoteError:
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return RemoteError(code, "", ENDED)
    metadata = await call.initial_metadata(), await call.trailing_metadata()
    return remote_error(grpc.aio.AioRpcError(code, *metadata, await call.details()))


def _at_once(metadata: Coroutine[Any, Any, RemoteError]) -> RemoteError:
    """Run a coroutine that never waits, because the call that it reads from is done, and return its
    result."""
    try:
        metadata.send(None)
    except StopIteration as done:
        error: RemoteError = done.value
        return error
    raise AssertionError("a call that is done does not tell how it ended")


async def _write(
    call: grpc.aio.StreamStreamCall, news: asyncio.Event, next_message: Callable[[], Any]
) -> None:
    try:
        while True:
            news.clear()
            while (message := next_message()) is not None:
                await call.write(message)
            await news.wait()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # the reader gets the reason
    except Exception as bug:
        log.error("nothing more can be said on a peer's stream", error=bug)  # noqa: TRY400
        call.cancel()


def _called_off() -> bool:
    """Return whether this task itself was cancelled, and not only the gRPC call that it waits for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
