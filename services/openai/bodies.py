"""How much of what clients send is in memory at a time, before anything has judged it?

Bodies that are read, parsed and tokenised are bounded together, and those of one caller to half of that: more
are refused while they come in. The beginning of each is free, so that whoever sends little is never refused
for those that send much; connections bound that (`bounded-admission`).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from starlette.requests import Request

from services.openai.api_settings import ApiSettings
from services.openai.backend import Backend, Overloaded
from services.openai.body import COMMAS_MAX, Held, read_body
from services.openai.door import caller_in
from services.openai.schemas import Shape
from services.runtime.freed_memory import give_back

AT_ONCE_BYTES: Final = 128 * 2**20
BODIES_AT_LEAST: Final = 4
"""Of the largest size, of one caller, whatever that size is."""
FREE_BYTES: Final = 64 * 2**10
LARGE_BYTES: Final = 2**20
"""Behind a larger one the memory that it took is given back to the system."""
GIVE_BACK_AFTER_S: Final = 1.0
RETRY_AFTER_S: Final = 1

M = TypeVar("M", bound=Shape)


class Bodies:
    """Of one application. Used from one event loop."""

    def __init__(self, settings: ApiSettings, backend: Backend) -> None:
        self._settings = settings
        self._backend = backend
        self._of_one_max = max(AT_ONCE_BYTES // 2, BODIES_AT_LEAST * settings.body_bytes_max)
        self._of: dict[bytes, int] = {}
        self._bytes = 0
        self._giving_back: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Bytes that are held now."""
        return self._bytes

    @asynccontextmanager
    async def of(self, request: Request, shape: type[M]) -> AsyncIterator[M]:
        """The request's body as `shape`, for as long as its texts are needed. Raises ApiError, Overloaded,
        ClientGone."""
        caller = caller_in(request.scope)
        held = Held(lambda more: self._take(caller, more), FREE_BYTES)
        settings = self._settings
        try:
            yield await read_body(
                request,
                shape,
                held,
                limit=settings.body_bytes_max,
                timeout_s=settings.body_timeout_s,
                commas_max=max(COMMAS_MAX, 2 * self._backend.limits().context_tokens),
            )
        finally:
            self._release(caller, held.counted)

    def _take(self, caller: bytes, more: int) -> None:
        own = self._of.get(caller, 0) + more
        if own > self._of_one_max or self._bytes + more > 2 * self._of_one_max:
            raise Overloaded("too many large requests are being read", RETRY_AFTER_S)
        self._of[caller] = own
        self._bytes += more

    def _release(self, caller: bytes, size: int) -> None:
        if not size:
            return
        self._bytes -= size
        self._of[caller] -= size
        if not self._of[caller]:
            del self._of[caller]
        if size > LARGE_BYTES and self._giving_back is None:
            self._giving_back = asyncio.get_running_loop().call_later(GIVE_BACK_AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._giving_back = None
        asyncio.get_running_loop().run_in_executor(None, give_back)
