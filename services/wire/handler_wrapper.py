"""Wrapper that runs a check before a gRPC handler, whatever the kind of its call."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

Before: TypeAlias = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]
"""Check before a call. It gets the request, or the iterator of all, and returns what the handler gets
instead. It aborts a call that is not to be served."""


def wrap_handler(
    before: Before, handler: grpc.RpcMethodHandler, decode: Callable[[bytes], Any]
) -> grpc.RpcMethodHandler:
    """Return a handler of the same kind that runs a check first. A handler that streams replies must be an
    asynchronous generator."""
    encode = handler.response_serializer

    async def reply(request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await handler.unary_unary(await before(request, context), context)

    async def replies(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        serve = handler.stream_stream if handler.request_streaming else handler.unary_stream
        async with aclosing(serve(await before(request, context), context)) as each:
            async for message in each:
                yield message

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(replies, decode, encode)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(replies, decode, encode)
    return grpc.unary_unary_rpc_method_handler(reply, decode, encode)
