"""How much of what clients send is in memory at a time, before anything has judged it?

Bodies that are read, parsed and tokenised are bounded together, and those of one caller to half of that: more
are refused while they come in. The first bytes of each count in a pool of their own, so that a small body is
not refused for large ones (`bounded-admission`).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from starlette.requests import Request

from baton.api.backend import Backend
from baton.api.http.authentication import caller_in
from baton.api.http.body_pool import BodyPool
from baton.api.http.body_reader import COMMAS_MAX, IncomingBody, ShapeOf, read_body
from baton.api.requests.schemas import Shape
from baton.api.settings import ApiSettings
from baton.runtime.memory_trimming import give_back

AT_ONCE_BYTES: Final = 128 * 2**20
BODIES_AT_LEAST: Final = 4
"""Of the largest size, of one caller, whatever that size is."""
BEGINNING_BYTES: Final = 64 * 2**10
"""Of each body, in the pool of beginnings."""
BEGINNINGS_BYTES: Final = 128 * 2**20
LARGE_BYTES: Final = 2**20
"""Behind a larger one, and behind one that never came whole, its memory is given back to the system."""
GIVE_BACK_AFTER_S: Final = 1.0

M = TypeVar("M", bound=Shape)


class RequestBodies:
    """Of one application. Used from one event loop."""

    def __init__(self, settings: ApiSettings, backend: Backend) -> None:
        self._settings = settings
        self._backend = backend
        caller_bytes_max = max(AT_ONCE_BYTES // 2, BODIES_AT_LEAST * settings.body_bytes_max)
        self._rests = BodyPool(
            2 * caller_bytes_max, caller_bytes_max, "too many large requests are being read"
        )
        self._beginnings = BodyPool(BEGINNINGS_BYTES, BEGINNINGS_BYTES // 2)
        self._giving_back: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Bytes that are held now."""
        return self._beginnings.bytes + self._rests.bytes

    @asynccontextmanager
    async def of(self, request: Request, shape: type[M] | ShapeOf[M]) -> AsyncIterator[M]:
        """The request's body as `shape`, for as long as its texts are needed. Raises ApiError, Overloaded,
        ClientGone."""
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
        asyncio.get_running_loop().run_in_executor(None, give_back)
