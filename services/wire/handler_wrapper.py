"""What is done before a handler serves a call, whatever kind of call it is?"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

Before: TypeAlias = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]
"""Is given the request, or the iterator of all, and gives what the handler is to have instead. It aborts a
call that is not to be served."""


def wrap_handler(
    before: Before, handler: grpc.RpcMethodHandler, decode: Callable[[bytes], Any]
) -> grpc.RpcMethodHandler:
    """A handler of the same kind. One that streams its replies must be an asynchronous generator."""
    encode = handler.response_serializer

    async def reply(request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await handler.unary_unary(await before(request, context), context)

    async def replies(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        serve = handler.stream_stream if handler.request_streaming else handler.unary_stream
        async with aclosing(serve(await before(request, context), context)) as each:
            async for said in each:
                yield said

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(replies, decode, encode)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(replies, decode, encode)
    return grpc.unary_unary_rpc_method_handler(reply, decode, encode)
