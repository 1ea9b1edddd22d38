"""What does a server answer to bytes that are no message?

Left alone, grpc tells the caller UNKNOWN, as for a bug of ours, and writes a traceback for each such call.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from services.wire.conversions import Malformed
from services.wire.errors import errors_as_status

NO_MESSAGE: Final = "the request is not a message of this method"


class RefuseUndecodable(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The call is answered like any other `Malformed`."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        decode, encode = _or_error(handler.request_deserializer), handler.response_serializer
        if handler.request_streaming:
            if inspect.isasyncgenfunction(handler.stream_stream):
                return grpc.stream_stream_rpc_method_handler(_streams(handler.stream_stream), decode, encode)
            return handler
        if not handler.response_streaming:
            return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary), decode, encode)
        if inspect.isasyncgenfunction(handler.unary_stream):
            return grpc.unary_stream_rpc_method_handler(_stream(handler.unary_stream), decode, encode)
        return handler


def _or_error(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decoded(raw: bytes) -> Any:
        try:
            return decode(raw)
        except DecodeError as error:
            return error

    return decoded


def _unary(serve: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def served(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await _refuse(request, context)
        return await serve(request, context)

    return served


def _stream(serve: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    async def served(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await _refuse(request, context)
        async with aclosing(serve(request, context)) as replies:
            async for reply in replies:
                yield reply

    return served


def _streams(serve: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    async def checked(requests: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if isinstance(request, DecodeError):
                raise Malformed(NO_MESSAGE)
            yield request

    async def served(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async with aclosing(serve(checked(requests), context)) as replies:
            async for reply in replies:
                yield reply

    return served


async def _refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
    if isinstance(request, DecodeError):
        async with errors_as_status(context):
            raise Malformed(NO_MESSAGE)
