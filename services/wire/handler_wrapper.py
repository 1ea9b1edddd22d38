"""Wrapper that runs a check before a gRPC handler, for unary and streaming calls."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

Before: TypeAlias = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]
"""Check that runs before a gRPC call. It gets the request, or the iterator of requests, and returns what to
pass to the handler. It aborts a call that is refused."""


def wrap_handler(
    before: Before, handler: grpc.RpcMethodHandler, decode: Callable[[bytes], Any]
) -> grpc.RpcMethodHandler:
    """Return a gRPC handler that runs the check `before` and then `handler`.

    A `handler` that streams replies must be an asynchronous generator. `decode`: decodes a request.
    """
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
