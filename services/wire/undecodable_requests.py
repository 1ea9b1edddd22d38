"""Interceptor that answers gRPC requests whose bytes do not decode.

gRPC itself would answer UNKNOWN, as for a bug of the server, and log a traceback for each such call.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from baton.wire.conversions import Malformed
from baton.wire.errors import errors_as_status
from baton.wire.handler_wrapper import wrap_handler

NO_MESSAGE: Final = "the request is not a message of this method"


class UndecodableInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Interceptor that refuses an undecodable request with `Malformed`, the error for invalid messages."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        serve = handler.stream_stream if handler.request_streaming else handler.unary_stream
        if handler.response_streaming and not inspect.isasyncgenfunction(serve):
            return handler
        return wrap_handler(_refuse, handler, _or_error(handler.request_deserializer))


def _or_error(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decoded(raw: bytes) -> Any:
        try:
            return decode(raw)
        except DecodeError as error:
            return error

    return decoded


async def _refuse(request: Any, context: grpc.aio.ServicerContext) -> Any:
    if isinstance(request, DecodeError):
        async with errors_as_status(context):
            raise Malformed(NO_MESSAGE)
    return _checked(request) if isinstance(request, AsyncIterator) else request


async def _checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, DecodeError):
            raise Malformed(NO_MESSAGE)
        yield request
