"""Run token: a shared secret by which the processes of one stack recognize each other without certificates.

The starter of the stack draws it, and passes it to every process in its environment. A client sends it with
each gRPC call, and a server refuses calls without it. So another user of the machine can neither cancel a
stream nor read a timeline. It is not encrypted in transit. For several machines, use certificates.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn

import grpc

from baton.wire.errors import NotProven, errors_as_status

KEY: Final = "baton-run-token"
OPEN: Final = "/grpc.health.v1.Health/"
"""Prefix of gRPC methods that need no run token. Platforms probe health without a token, and learn nothing
about rooms there."""


class TokenChannel:
    """Wrapper of a grpc or grpc.aio channel that sends the run token with each call."""

    def __init__(self, channel: Any, token: str) -> None:
        self._channel = channel
        self._shown = ((KEY, token),)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def unary_unary(self, *arguments: Any, **more: Any) -> Any:
        return _TokenCall(self._channel.unary_unary(*arguments, **more), self._shown)

    def unary_stream(self, *arguments: Any, **more: Any) -> Any:
        return _TokenCall(self._channel.unary_stream(*arguments, **more), self._shown)

    def stream_unary(self, *arguments: Any, **more: Any) -> Any:
        return _TokenCall(self._channel.stream_unary(*arguments, **more), self._shown)

    def stream_stream(self, *arguments: Any, **more: Any) -> Any:
        return _TokenCall(self._channel.stream_stream(*arguments, **more), self._shown)


class _TokenCall:
    """Callable of one gRPC method that sends the run token with each call."""

    def __init__(self, method: Any, shown: tuple[tuple[str, str], ...]) -> None:
        self._method = method
        self._shown = shown

    def __call__(self, *arguments: Any, metadata: Any = None, **more: Any) -> Any:
        return self._method(*arguments, metadata=(*self._shown, *(metadata or ())), **more)

    def future(self, *arguments: Any, metadata: Any = None, **more: Any) -> Any:
        return self._method.future(*arguments, metadata=(*self._shown, *(metadata or ())), **more)

    def with_call(self, *arguments: Any, metadata: Any = None, **more: Any) -> Any:
        return self._method.with_call(*arguments, metadata=(*self._shown, *(metadata or ())), **more)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Interceptor that refuses calls without the right run token (`known-callers-only`)."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        if details.method.startswith(OPEN) or self._is_shown(details.invocation_metadata):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _is_shown(self, metadata: Any) -> bool:
        shown = next((value for key, value in metadata if key == KEY), "")
        return hmac.compare_digest(self._token, shown if isinstance(shown, bytes) else shown.encode())


async def _refuse(_requests: Any, context: grpc.aio.ServicerContext) -> NoReturn:
    async with errors_as_status(context):
        raise NotProven(
            f"this stack asks for its run's token: give {KEY} what BATON_RUN_TOKEN was at its start"
        )
    raise AssertionError("it was answered")
