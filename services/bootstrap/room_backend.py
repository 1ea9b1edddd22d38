"""Backend of the HTTP API: it admits a request, and returns the stream of its tokens."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from baton.api.backend import Hangup, Limits, client_gone
from baton.api.errors import CLIENT_GONE
from baton.api.http.backend_errors import from_backend
from baton.bootstrap.admission.placement_request import QueueFull
from baton.bootstrap.admission.refusals import NO_SPACE, not_placed
from baton.bootstrap.history import NO_STATUS
from baton.bootstrap.request_stream import RequestStream, reusable
from baton.bootstrap.room_controller import RoomController
from baton.bootstrap.room_stream import SIBLING_FAILED, RoomStream
from baton.fleet.need import Need
from baton.fleet.retry import RetryBounds
from baton.fleet.room_entry import RoomEntry
from baton.rooms.errors import NoSuchWorker
from baton.rooms.phases import Side
from baton.rooms.request import Request
from baton.wire.load_messages import adoption_key

GIVEN_UP: Final = {
    Hangup.CLIENT_GONE: ("the client hung up while it waited", CLIENT_GONE),
    Hangup.REQUEST_FAILED: (SIBLING_FAILED, NO_STATUS),
}
"""Text and HTTP status to record for a request that is cancelled while it waits for its first room, by the
reason of the cancel."""


ORPHAN_S: Final = 0.25
"""Longest wait for the report that the room of a resumed stream is an orphan, in seconds. A client may come
back before its worker has seen that the bootstrap is gone."""
ADOPTION_S: Final = 5.0
"""Longest wait for a decode worker's turn that gives a room to this router, in seconds."""


class RoomBackend:
    """Backend of the HTTP API: it opens rooms for requests and streams the tokens from them."""

    def __init__(
        self,
        rooms: RoomController,
        context_tokens: int,
        timeout_s: float,
        bounds: RetryBounds = RetryBounds(),  # noqa: B008 - frozen
    ) -> None:
        self.rooms = rooms
        self._context_tokens = context_tokens
        self._timeout_s = timeout_s
        self._bounds = bounds
        self._limits = Limits(context_tokens, 0, 0)
        self._as_of = -1
        """Value of the workers' counter of changes when the limits were last computed."""

    def limits(self) -> Limits:
        changes = self.rooms.registry.changes
        if changes != self._as_of:
            self._as_of, self._limits = changes, self._reckoned()
        return self._limits

    def _reckoned(self) -> Limits:
        registry = self.rooms.registry
        return Limits(
            self._context_tokens,
            registry.tokens_max(Side.PREFILL),
            registry.tokens_max(Side.DECODE),
            registry.tokens_max_now(Side.DECODE),
            registry.decode_page_tokens,
            registry.quantize,
            registry.tokens_max_alone,
            registry.engine,
        )

    async def generate(self, request: Request, why: Callable[[], Hangup] = client_gone) -> RequestStream:
        since_ms = self.rooms.clock.now_ms()
        limits = self.limits()
        most = max(limits.prompt_tokens, limits.alone_tokens)
        request = replace(request, arrived_ms=self.rooms.clock.wall_ms(), carried_tokens_max=most)
        first = await self._adopt(request) if request.resumes else None
        queue_ends_s = asyncio.get_running_loop().time() + self.rooms.admission.queue_timeout_s
        if first is None:
            first = await self._admit(request, since_ms, why)
        return RequestStream(
            self.rooms, self._drive, first, request, self._timeout_s, self._bounds, queue_ends_s
        )

    async def _admit(self, request: Request, since_ms: int, why: Callable[[], Hangup]) -> RoomStream:
        """Open a request's first room, and return its stream. `since_ms`: time at which the request came, in
        milliseconds. Raises Overloaded and NoWorker."""
        try:
            entry = await self.rooms.admission.admit(
                request.request_id,
                request.prefill_tokens,
                request.tokens_max,
                prompt=reusable(request),
                salt=request.salt,
                trace=request.trace,
                choices=request.choices,
                priority=request.priority,
                tenant=request.tenant,
                arrived_ms=request.arrived_ms,
                may_be_local=request.prompt_logprobs is None,
                scores=request.scores,
            )
        except asyncio.CancelledError:
            outcome, status = GIVEN_UP[why()]
            self._note_refused(request, outcome, status, since_ms)
            raise
        except (NoSuchWorker, QueueFull, TimeoutError) as error:
            refused = not_placed(self.rooms.admission, request, error)
            self._note_refused(request, str(error) or NO_SPACE, from_backend(refused).status, since_ms)
            raise refused from error
        return self._drive(entry, request, self._timeout_s)

    async def _adopt(self, request: Request) -> RoomStream | None:
        """Adopt the room of another router that computes the answer of a request. Return its stream, or None
        if there is none (`adopt-first-wins`)."""
        if not request.is_replayable:
            return None
        rooms = self.rooms
        found = await rooms.orphans.take(adoption_key(request), ORPHAN_S)
        if found is None:
            return None
        orphan, decode = found
        need = Need(request.prefill_tokens, request.tokens_max, choices=request.choices)
        trace_id = "" if request.trace is None else request.trace.trace_id
        entry = rooms.registry.adopt_room(
            orphan.room, request.request_id, decode, orphan.prefill, need, rooms.clock.now_ms(), trace_id
        )
        if entry is None:
            return None
        rooms.timelines.begin(entry, request.trace)
        stream = RoomStream(rooms, entry, request, self._timeout_s, orphan)
        stream.start()
        try:
            return stream if await stream.adopted(ADOPTION_S) else None
        except BaseException:
            await stream.hang_up(Hangup.CLIENT_GONE)
            raise

    def _note_refused(self, request: Request, why: str, status: int, since_ms: int) -> None:
        """Record a request that got no room, and whose client is answered with HTTP `status`. `since_ms`:
        time at which it came, in milliseconds."""
        clock = self.rooms.clock
        waited_ms = clock.now_ms() - since_ms
        self.rooms.history.refuse(request.request_id, why, status, clock.wall_ms(), waited_ms)

    def follow(self, entry: RoomEntry, request: Request) -> RoomStream:
        """Start the stream of tokens of an opened room. If the room fails, no other is opened."""
        return self._drive(entry, request, self._timeout_s)

    def _drive(self, entry: RoomEntry, request: Request, timeout_s: float) -> RoomStream:
        stream = RoomStream(self.rooms, entry, request, timeout_s)
        stream.start()
        return stream
