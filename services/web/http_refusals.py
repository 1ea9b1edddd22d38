"""Refusals of requests before any route: malformed, too long, too slow, or for another host.

The application answers a refused request, after the earlier requests of the connection. So the answer has a
request id and the form of all other errors, and is counted once. An application that does not answer refusals
is wrapped in `RefusalMiddleware`.
"""

import json
import secrets
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

IN_STATE: Final = "refusal"
"""Key under which the state of a request's ASGI scope holds the HttpRefusal."""
NO_METHOD: Final = ""
"""HTTP method in the ASGI scope of a request that was refused before its head (its headers) was complete."""


@dataclass(frozen=True)
class HttpRefusal(Exception):
    """Reason why the server refuses a request: HTTP status, error code and message."""

    status: int
    code: str
    message: str

    def __str__(self) -> str:
        return self.message


NO_HTTP: Final = HttpRefusal(400, "invalid_http", "Invalid HTTP request received.")
TLS: Final = HttpRefusal(
    400, "invalid_http", "TLS came in, and this port speaks plain HTTP: ask it by http://."
)
ONE_HOST: Final = HttpRefusal(400, "invalid_http", "A request has to have one Host header.")
NO_METHOD_OF_OURS: Final = HttpRefusal(501, "not_implemented", "No such method is known here.")
LONG_TARGET: Final = HttpRefusal(414, "uri_too_long", "The request line is longer than any that is read.")
LONG_HEAD: Final = HttpRefusal(
    431,
    "header_fields_too_large",
    "The headers, or the trailers, are more than are read: 64 KiB, 256 of them.",
)
SLOW_HEAD: Final = HttpRefusal(408, "request_timeout", "The request's head did not come in time.")

PIPELINED: Final = HttpRefusal(
    429,
    "too_many_requests",
    "Too many requests came on one connection before the first was answered: 16, or 64 KiB.",
)


def refusal_in(scope: Any) -> HttpRefusal | None:
    """Return the reason why a request is refused, or None. A reason may still come while its body is read."""
    found = scope.get("state", {}).get(IN_STATE)
    return found if isinstance(found, HttpRefusal) else None


class RefusalMiddleware:
    """ASGI middleware that answers refused HTTP requests itself. It is for applications that do not answer
    refusals."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (refusal := refusal_in(scope)) is not None:
            await _answer(refusal, send)
            return

        async def receive_unless_refused() -> Message:
            message = await receive()
            return message if refusal_in(scope) is None else {"type": "http.disconnect"}

        await self._app(scope, receive_unless_refused, send)


async def _answer(refusal: HttpRefusal, send: Send) -> None:
    """Answer a refused request with an error in OpenAI's format."""
    error = {"message": str(refusal), "type": "invalid_request_error", "param": None, "code": refusal.code}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", secrets.token_hex(16).encode()),
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
