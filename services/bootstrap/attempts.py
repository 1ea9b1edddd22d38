"""How does one request become one answer, when the rooms that it is served in may fail?

A room that failed for a reason that is not the client's is followed by a new one (`fresh-attempt`), on
another pair if there is one, with the tokens that were passed on as its `output`: a draw depends on the
request and its position alone, so the stream goes on as if nothing had happened. What the old room still
sends is not read.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from services.bootstrap.admission import QUEUED_GONE, QueueFull, Retry
from services.bootstrap.follower import SIBLING_FAILED, RoomStream
from services.bootstrap.notebook import NO_STATUS
from services.bootstrap.rooms import Rooms
from services.openai.backend import Hangup, Limits, NoWorker, Overloaded, RoomFailed, TokenBatch, client_gone
from services.rooms.errors import NoSuchWorker
from services.rooms.ids import Incarnation
from services.rooms.phases import Side
from services.rooms.placement import Need
from services.rooms.registry import RoomEntry
from services.rooms.request import Request
from services.rooms.retry import RETRIED, RetryBounds, guilty, may_retry, pause_s, went_on

UNAVAILABLE: Final = 503
TOO_MANY: Final = 429
GONE: Final = 499
"""What the API answers for NoWorker and Overloaded, and what it counts for a client that has gone."""

GIVEN_UP: Final = {
    Hangup.CLIENT_GONE: ("the client hung up while it waited", GONE),
    Hangup.REQUEST_FAILED: (SIBLING_FAILED, NO_STATUS),
}
"""What is noted of a request that is cancelled while it waits for a room."""

GIVEN_UP_BETWEEN: Final = "given up while it waited for another room"

Follow = Callable[[RoomEntry, Request, float], RoomStream]
"""Drive an opened room, for so many seconds at most."""


class RequestStream:
    """One request being served: a `services.openai.backend.TokenStream` over its rooms, one at a time.

    The next room is opened when the reader has read all of the last one, and in the reader's own task: a
    client that hangs up meanwhile leaves nothing behind.
    """

    def __init__(
        self,
        rooms: Rooms,
        follow: Follow,
        entry: RoomEntry,
        request: Request,
        timeout_s: float,
        bounds: RetryBounds,
    ) -> None:
        self.cached_tokens = 0
        self._rooms = rooms
        self._follow = follow
        self._request = request
        self._bounds = bounds
        self._ends_s = asyncio.get_running_loop().time() + timeout_s
        self._output: list[int] = []
        self._avoid: set[Incarnation] = set()
        self._opened = 1
        """Rooms in a row, this one included, before which none brought the request further."""
        self._began = 0
        """Output tokens when this one was opened."""
        self._hung_up = False
        self._room = self._first = follow(entry, request, timeout_s)

    async def next(self) -> TokenBatch:
        while True:
            try:
                batch = await self._room.next()
            except RoomFailed as failure:
                self._room = await self._next_room(failure)
                continue
            if not self._output:
                self._first = self._room
            self._output += [token.id for token in batch.tokens]
            self.cached_tokens = self._first.cached_tokens
            return batch

    async def hang_up(self, why: Hangup) -> None:
        self._hung_up = True
        await self._room.hang_up(why)

    async def _next_room(self, failure: RoomFailed) -> RoomStream:
        """Where the request goes on. Raises the cause of the last room's failure where it does not."""
        failed, cause = self._room.entry, self._room.cause
        left_s = self._left_s()
        if cause is None or self._hung_up:
            raise failure
        if went_on(len(self._output) - self._began):
            self._opened = 1
        pause = pause_s(cause.reason, self._opened, self._request.sampling.seed, self._request.request_id)
        if not may_retry(cause.reason, self._opened, left_s - pause, self._bounds):
            if cause.reason in RETRIED:
                rooms = f"{self._opened} of {self._bounds.rooms_max} rooms in a row tried"
                had = f"{rooms}, {max(left_s, 0.0):.1f} s left"
                self._rooms.timelines.tell(failed.id, "not retried", had)
            raise failure
        self._avoid |= {failed.worker(side).incarnation for side in guilty(cause.reason, self._room.teller)}
        request = replace(self._request, output=tuple(self._output))
        need = Need(request.prefill_tokens, request.tokens_max)
        fits = all(need.on(side) <= failed.worker(side).tokens_max for side in Side)
        retry = Retry(failed.id, cause.reason, frozenset(self._avoid), self._bounds.wait_s, pause, fits)
        try:
            async with asyncio.timeout(left_s):
                entry = await self._rooms.admission.admit(
                    request.request_id,
                    request.prefill_tokens,
                    request.tokens_max,
                    retry,
                    request.prompt,
                    request.salt,
                    request.trace,
                )
        except asyncio.CancelledError:
            self._rooms.timelines.tell(failed.id, "not retried", GIVEN_UP_BETWEEN)
            raise
        except (NoSuchWorker, QueueFull, TimeoutError) as error:
            why = str(error) or "no pair of workers had space in time"
            self._rooms.timelines.tell(failed.id, "not retried", why)
            raise RoomFailed(f"{cause.text}; not retried: {why}", cause.reason.value) from error
        if self._hung_up:
            self._rooms.admission.discard(entry, QUEUED_GONE)
            self._rooms.timelines.tell(failed.id, "not retried", GIVEN_UP_BETWEEN)
            raise failure
        self._opened += 1
        self._began = len(self._output)
        return self._follow(entry, request, max(self._left_s(), 0.0))

    def _left_s(self) -> float:
        return self._ends_s - asyncio.get_running_loop().time()


class RoomBackend:
    """The API's backend: admission, and a stream over as many rooms as it takes."""

    def __init__(
        self,
        rooms: Rooms,
        context_tokens: int,
        timeout_s: float,
        bounds: RetryBounds = RetryBounds(),  # noqa: B008 - frozen
    ) -> None:
        self._rooms = rooms
        self._context_tokens = context_tokens
        self._timeout_s = timeout_s
        self._bounds = bounds

    def limits(self) -> Limits:
        registry = self._rooms.registry
        return Limits(
            self._context_tokens,
            registry.tokens_max(Side.PREFILL),
            registry.tokens_max(Side.DECODE),
            registry.tokens_least_now(Side.DECODE),
        )

    async def generate(self, request: Request, why: Callable[[], Hangup] = client_gone) -> RequestStream:
        since_ms = self._rooms.clock.now_ms()
        try:
            entry = await self._rooms.admission.admit(
                request.request_id,
                request.prefill_tokens,
                request.tokens_max,
                prompt=request.prompt,
                salt=request.salt,
                trace=request.trace,
                time_ms=int(self._timeout_s * 1000),
            )
        except asyncio.CancelledError:
            told, status = GIVEN_UP[why()]
            self._note_refused(request, told, status, since_ms)
            raise
        except NoSuchWorker as error:
            self._note_refused(request, str(error), UNAVAILABLE, since_ms)
            raise NoWorker(str(error)) from error
        except (QueueFull, TimeoutError) as error:
            full = str(error) or "no pair of workers had space in time"
            self._note_refused(request, full, TOO_MANY, since_ms)
            after_s = self._rooms.admission.retry_after_s()
            raise Overloaded(f"every worker is busy: {full}", after_s) from error
        return RequestStream(self._rooms, self._drive, entry, request, self._timeout_s, self._bounds)

    def _note_refused(self, request: Request, why: str, status: int, since_ms: int) -> None:
        """A request that came at `since_ms` gets no room; its client is told so with `status`."""
        clock = self._rooms.clock
        waited_ms = clock.now_ms() - since_ms
        self._rooms.notebook.refuse(request.request_id, why, status, clock.wall_ms(), waited_ms)

    def follow(self, entry: RoomEntry, request: Request) -> RoomStream:
        """Drive one opened room, and no other when it fails."""
        return self._drive(entry, request, self._timeout_s)

    def _drive(self, entry: RoomEntry, request: Request, timeout_s: float) -> RoomStream:
        stream = RoomStream(self._rooms, entry, request, timeout_s)
        stream.start()
        return stream
