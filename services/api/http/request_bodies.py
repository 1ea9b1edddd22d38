"""Reading of request bodies within limits of size, time and memory, and parsing into a schema.

All bodies that are being read, parsed or tokenised share one memory limit, and each caller may use half of
it. Bodies that exceed it are refused while they arrive. The first bytes of each body count in a pool of their
own, so that a small body is not refused because of large ones (`bounded-admission`).
"""

import asyncio
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from baton.api.backend import Backend
from baton.api.errors import ApiError, invalid
from baton.api.http.authentication import caller_in
from baton.api.http.body_pool import BodyPool, IncomingBody
from baton.api.http.disconnect import ClientGone
from baton.api.http.http_exchange import HttpExchange, exchange_of
from baton.api.requests.field_types import FIELDS_MAX
from baton.api.requests.json_reader import TooDeep, read_json
from baton.api.requests.schema_fields import fields_of
from baton.api.requests.schemas import Shape
from baton.api.requests.validation_errors import first_fault
from baton.api.resuming.stream_identity import digest_of_body
from baton.api.settings import ApiSettings
from baton.runtime.memory_trimming import trim_memory
from baton.web.http_refusals import refusal_in

POOL_BYTES: Final = 128 * 2**20
"""Least size in bytes of the memory pool for all bodies. The pool is larger if large bodies are allowed."""
CALLER_BODIES_MIN: Final = 4
"""Least number of request bodies of the largest allowed size that fit into one caller's share of the memory
pool."""
BEGINNING_BYTES: Final = 64 * 2**10
"""Number of leading bytes of each body that count in the separate memory pool for the beginnings of
bodies."""
BEGINNINGS_BYTES: Final = 128 * 2**20
"""Size in bytes of the memory pool in which the first BEGINNING_BYTES bytes of each request body count."""
LARGE_BYTES: Final = 2**20
"""Body size in bytes above which freed memory is returned to the operating system after the request."""
GIVE_BACK_AFTER_S: Final = 1.0
LENGTH_DIGITS_MAX: Final = 18
SMALL_BYTES: Final = 64 * 2**10
"""Body size in bytes up to which parsing takes no noticeable time, whatever the body contains."""
VALUES_MAX: Final = 100_000
"""Most strings, lists and objects in one body. Each becomes a Python object while all other requests wait. A
chat with the most messages allowed, of several parts each, has fewer."""
COMMAS_MAX: Final = 2**18
"""Most commas in one body, which limits lists of token ids. Parsing a token id costs a tenth of parsing a
string. The limit is higher if the model's context is longer."""

M = TypeVar("M", bound=Shape)
ShapeOf = Callable[[Mapping[str, Any]], type[M]]
"""Function that chooses the schema of a body from the body's fields."""


class RequestBodies:
    """Reader of all request bodies of one application, within the memory limits. Used from one event loop."""

    def __init__(self, settings: ApiSettings, backend: Backend) -> None:
        self._settings = settings
        self._backend = backend
        caller_bytes_max = max(POOL_BYTES // 2, CALLER_BODIES_MIN * settings.body_bytes_max)
        self._rests = BodyPool(
            2 * caller_bytes_max, caller_bytes_max, "too many large requests are being read"
        )
        self._beginnings = BodyPool(BEGINNINGS_BYTES, BEGINNINGS_BYTES // 2)
        self._giving_back: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return the number of bytes of all request bodies that count against the memory limits at
        present."""
        return self._beginnings.bytes + self._rests.bytes

    @asynccontextmanager
    async def of(self, request: Request, shape: type[M] | ShapeOf[M]) -> AsyncIterator[M]:
        """Yield the request's body, parsed as `shape`. Its bytes count against the memory limits until the
        block ends. Raises ApiError, Overloaded, ClientGone."""
        incoming = IncomingBody(caller_in(request.scope), self._beginnings, self._rests, BEGINNING_BYTES)
        settings = self._settings
        try:
            yield await read_body(
                request,
                shape,
                incoming,
                limit=settings.body_bytes_max,
                timeout_s=settings.body_timeout_s,
                commas_max=max(COMMAS_MAX, 2 * self._backend.limits().context_tokens),
            )
        finally:
            incoming.release()
            if not incoming.is_whole or incoming.size > LARGE_BYTES:
                self._give_back_soon()

    def _give_back_soon(self) -> None:
        if self._giving_back is None:
            self._giving_back = asyncio.get_running_loop().call_later(GIVE_BACK_AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._giving_back = None
        asyncio.get_running_loop().run_in_executor(None, trim_memory)


async def read_body(
    request: Request,
    shape: type[M] | ShapeOf[M],
    incoming: IncomingBody,
    *,
    limit: int,
    timeout_s: float,
    commas_max: int,
) -> M:
    """Read the request's body, and return it parsed as `shape`.

    `incoming`: share of the body in the memory limits. `limit`: most bytes. `timeout_s`: seconds for the
    whole body. `commas_max`: most commas. Raises ApiError that names the invalid field, ClientGone if the
    connection closed before the end, and Overloaded.
    """
    exchange = exchange_of(request)
    media_type = exchange.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(415, "The Content-Type has to be application/json.", code="unsupported_media_type")
    if exchange.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(
            415,
            "The body has to be sent as it is, without a Content-Encoding.",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": "identity"},
        )
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            incoming.begin(deadline)
            raw = await _read(request, exchange, incoming, limit)
    except TimeoutError:
        if incoming.was_dropped:
            raise incoming.overloaded() from None
        raise ApiError(
            408, f"The body was not sent within {timeout_s:g} s.", code="request_timeout"
        ) from None
    body = parse(raw, shape, commas_max)
    if getattr(body, "stream", False):
        exchange.body_digest = digest_of_body(raw)
    return body


def parse(raw: bytes, shape: type[M] | ShapeOf[M], commas_max: int = COMMAS_MAX) -> M:
    """Return the JSON text `raw`, parsed and validated as `shape`. A null means that the field is absent.
    Raises ApiError."""
    if len(raw) > SMALL_BYTES and _holds_too_much(raw, commas_max):
        much = f"The body holds more than {VALUES_MAX} texts, lists and objects, or {commas_max} numbers."
        raise invalid(None, much)
    try:
        text = raw.removeprefix(BOM_UTF8).decode()  # Windows' editors and shells write one into their files
    except UnicodeDecodeError as error:
        raise invalid(None, f"The body is not valid UTF-8 (byte {error.start}).", "invalid_utf8") from None
    try:
        value = read_json(text)
    except TooDeep as error:
        raise invalid(None, f"The body cannot be taken: {error}.", "nested_too_deeply") from None
    except ValueError as error:
        raise invalid(None, f"The body is not valid JSON: {error}.", "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(None, "The body has to be a JSON object.", "invalid_type")
    if len(value) > FIELDS_MAX:
        raise invalid(None, f"The body has {len(value)} fields, more than any request may have.")
    own: type[M] = shape if isinstance(shape, type) else shape(value)
    given = own.unserved.without_ignored(value)
    try:
        return own.model_validate(given)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise first_fault(faults, given, fields_of(own), own.unserved) from None


async def _read(request: Request, exchange: HttpExchange, incoming: IncomingBody, limit: int) -> bytes:
    """Return the bytes of a body, or refuse it as soon as it is known to be too large. The HTTP server
    discards the rest. So a client that first sends everything still gets to read the error."""
    declared = exchange.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > LENGTH_DIGITS_MAX or int(declared) > limit):
        raise _too_large(limit)
    raw = bytearray()
    more = True
    while more:
        message = await request.receive()
        if (refusal := refusal_in(request.scope)) is not None:
            raise refusal
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        if len(raw) + len(chunk) > limit:
            raise _too_large(limit)
        incoming.grow(len(chunk))
        raw += chunk
        more = message.get("more_body", False)
    incoming.finish()
    return bytes(raw)


def _holds_too_much(raw: bytes, commas_max: int) -> bool:
    """Return whether a body has too many values. It scans the raw bytes, before any object is made of them.

    A string begins and ends with a quote. A quote within a string follows an odd number of backslashes.
    """
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") + raw.count(b'"') <= VALUES_MAX:
        return False
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = plain.count(b'"') // 2
    if strings > VALUES_MAX:
        return True
    between = b"".join(plain.split(b'"')[::2])
    opened = between.count(b"[") + between.count(b"{")
    return strings + opened > VALUES_MAX or between.count(b",") > commas_max


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than {limit} bytes.", code="request_too_large")
