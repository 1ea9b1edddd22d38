"""Token of a run, by which the parts of one stack recognize each other without certificates.

The starter of the stack draws it, and passes it to every part in its environment. A caller shows it with each
call, and a server refuses calls without it. So another user of the machine neither cancels a stream nor reads
a timeline. It is not encrypted in transit. For several machines, use certificates.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn

import grpc

from baton.wire.errors import NotProven, errors_as_status

KEY: Final = "baton-run-token"
OPEN: Final = "/grpc.health.v1.Health/"
"""Prefix of methods without a token: platforms probe health, have no token, and learn nothing of rooms."""


class TokenChannel:
    """A channel of grpc or grpc.aio whose calls show the token. All else is the wrapped channel's."""

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
    """Caller of one method that shows the token."""

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
    """Checks the token of each call (`known-callers-only`)."""

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
