"""What did the client send, if it was JSON of the right shape and of a bearable size?"""

import asyncio
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from baton.api.backend import Overloaded
from baton.api.errors import ApiError, invalid
from baton.api.http.body_pool import BodyPool, PooledBody
from baton.api.http.disconnect import ClientGone
from baton.api.http.request_headers import header
from baton.api.requests.json_reader import TooDeep, read_json
from baton.api.requests.schemas import FIELDS_MAX, Shape, fields_of
from baton.api.requests.validation_errors import first_fault
from baton.web.http_refusals import refusal_in

LENGTH_DIGITS_MAX: Final = 18
SMALL_BYTES: Final = 64 * 2**10
"""What is made of a body up to here takes no time, whatever it holds."""
VALUES_MAX: Final = 100_000
"""Texts, lists and objects of a body: of each an object is made, while every other request waits. The most
messages that a request may have, each of several parts, are fewer."""
COMMAS_MAX: Final = 2**18
"""Token ids, which cost a tenth of that; more where the context has more."""

M = TypeVar("M", bound=Shape)
ShapeOf = Callable[[Mapping[str, Any]], type[M]]
"""The shape of a body, by the fields that it has."""


class IncomingBody:
    """A body's shares of two pools: of its first bytes, and of the rest (`bounded-admission`)."""

    def __init__(self, caller: bytes, beginnings: BodyPool, rests: BodyPool, beginning_bytes: int) -> None:
        """`beginning_bytes`: how many bytes count in `beginnings`."""
        self._pools = beginnings, rests
        self._shares = PooledBody(caller, self._drop), PooledBody(caller, self._drop)
        self._beginning_bytes = beginning_bytes
        self._deadline: asyncio.Timeout | None = None
        self.size = 0
        self.is_whole = False

    @property
    def was_dropped(self) -> bool:
        """Whether the body had to make room for others."""
        return any(share.dropped for share in self._shares)

    def begin(self, deadline: asyncio.Timeout) -> None:
        """`deadline`: of the reading, which ends at once if the body has to make room."""
        self._deadline = deadline

    def grow(self, more: int) -> None:
        """Count `more` bytes. Raises Overloaded."""
        if self.was_dropped:
            raise self.overloaded()
        first = min(more, max(self._beginning_bytes - self.size, 0))
        self.size += more
        for pool, share, part in zip(self._pools, self._shares, (first, more - first), strict=True):
            if part:
                pool.take(share, part)

    def finish(self) -> None:
        """The body is whole."""
        self.is_whole = True
        for pool, share in zip(self._pools, self._shares, strict=True):
            pool.finish(share)

    def release(self) -> None:
        """Its texts are no longer needed."""
        for pool, share in zip(self._pools, self._shares, strict=True):
            pool.release(share)

    def overloaded(self) -> Overloaded:
        """Why a body was dropped."""
        return self._pools[0].overloaded()

    def _drop(self) -> None:
        self.release()
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())


async def read_body(
    request: Request,
    shape: type[M] | ShapeOf[M],
    incoming: IncomingBody,
    *,
    limit: int,
    timeout_s: float,
    commas_max: int,
) -> M:
    """The request's body as `shape`. At most `limit` bytes, sent within `timeout_s`; `incoming` counts them.

    Raises ApiError that names the field at fault, ClientGone if the connection closed before the end, and
    Overloaded.
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
        async with asyncio.timeout(timeout_s) as deadline:
            incoming.begin(deadline)
            raw = await _read(request, incoming, limit)
    except TimeoutError:
        if incoming.was_dropped:
            raise incoming.overloaded() from None
        raise ApiError(
            408, f"The body was not sent within {timeout_s:g} s.", code="request_timeout"
        ) from None
    return parse(raw, shape, commas_max)


def parse(raw: bytes, shape: type[M] | ShapeOf[M], commas_max: int = COMMAS_MAX) -> M:
    """`raw` as JSON of `shape`; null means absent. Raises ApiError."""
    if len(raw) > SMALL_BYTES and _is_much(raw, commas_max):
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


async def _read(request: Request, incoming: IncomingBody, limit: int) -> bytes:
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
        incoming.grow(len(chunk))
        raw += chunk
        more = message.get("more_body", False)
    incoming.finish()
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
