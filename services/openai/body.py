"""What did the client send, if it was JSON of the right shape and of a bearable size?"""

import asyncio
from codecs import BOM_UTF8
from collections.abc import Callable
from typing import Final, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from services.openai.errors import ApiError, invalid
from services.openai.field_faults import first_fault
from services.openai.hangup import ClientGone
from services.openai.headers import header
from services.openai.schemas import FIELDS_MAX, Shape, fields_of
from services.runtime.http_refusal import refusal_in

LENGTH_DIGITS_MAX: Final = 18
SMALL_BYTES: Final = 64 * 2**10
"""What is made of a body up to here takes no time, whatever it holds."""
VALUES_MAX: Final = 100_000
"""Texts, lists and objects of a body: of each an object is made, while every other request waits. The most
messages that a request may have, each of several parts, are fewer."""
COMMAS_MAX: Final = 2**18
"""Token ids, which cost a tenth of that; more where the context has more."""

M = TypeVar("M", bound=Shape)


class Held:
    """What of one body is counted."""

    def __init__(self, take: Callable[[int], None], free: int) -> None:
        """`take` may refuse more bytes, by raising. The first `free` bytes are not counted."""
        self._take = take
        self._free = free
        self._bytes = 0
        self.counted = 0

    def grow(self, more: int) -> None:
        self._bytes += more
        uncounted = max(self._bytes - self._free, 0) - self.counted
        if uncounted > 0:
            self._take(uncounted)
            self.counted += uncounted


async def read_body(
    request: Request, shape: type[M], held: Held, *, limit: int, timeout_s: float, commas_max: int
) -> M:
    """The request's body as `shape`. At most `limit` bytes, sent within `timeout_s`; `held` is told of each.

    Raises ApiError that names the field at fault, ClientGone if the connection closed before the end, and
    what `held` raises.
    """
    media_type = (header(request.scope, b"content-type") or "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(415, "The Content-Type has to be application/json.", code="unsupported_media_type")
    encoding = header(request.scope, b"content-encoding") or "identity"
    if encoding.strip().lower() != "identity":
        raise ApiError(
            415,
            "The body has to be sent as it is, without a Content-Encoding.",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": "identity"},
        )
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request, held, limit)
    except TimeoutError:
        raise ApiError(
            408, f"The body was not sent within {timeout_s:g} s.", code="request_timeout"
        ) from None
    return parse(raw, shape, commas_max)


def parse(raw: bytes, shape: type[M], commas_max: int = COMMAS_MAX) -> M:
    """`raw` as JSON of `shape`; null means absent. Raises ApiError."""
    if len(raw) > SMALL_BYTES and _is_much(raw, commas_max):
        much = f"The body holds more than {VALUES_MAX} texts, lists and objects, or {commas_max} numbers."
        raise invalid(None, much)
    try:
        text = raw.removeprefix(BOM_UTF8).decode()  # Windows' editors and shells write one into their files
    except UnicodeDecodeError as error:
        raise invalid(None, f"The body is not valid UTF-8 (byte {error.start}).", "invalid_utf8") from None
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(None, f"The body is not valid JSON: {error}.", "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(None, "The body has to be a JSON object.", "invalid_type")
    if len(value) > FIELDS_MAX:
        raise invalid(None, f"The body has {len(value)} fields, more than any request may have.")
    given = shape.unserved.without_ignored(value)
    try:
        return shape.model_validate(given)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise first_fault(faults, given, fields_of(shape), shape.unserved) from None


async def _read(request: Request, held: Held, limit: int) -> bytes:
    """Refuses as soon as it is known to be too much; the server below drops what still comes in, so that
    a client that first writes all of it gets to read the answer."""
    declared = header(request.scope, b"content-length") or ""
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
        held.grow(len(chunk))
        raw += chunk
        more = message.get("more_body", False)
    return bytes(raw)


def _is_much(raw: bytes, commas_max: int) -> bool:
    """Told before anything is made of it, by passes over the bytes alone.

    A text begins and ends with a quote, and inside of it quotes stand behind an odd number of backslashes.
    """
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") + raw.count(b'"') <= VALUES_MAX:
        return False
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = plain.count(b'"') // 2
    if texts > VALUES_MAX:
        return True
    between = b"".join(plain.split(b'"')[::2])
    opened = between.count(b"[") + between.count(b"{")
    return texts + opened > VALUES_MAX or between.count(b",") > commas_max


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than {limit} bytes.", code="request_too_large")
