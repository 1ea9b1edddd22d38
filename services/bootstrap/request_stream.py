"""How does one request become one answer, when the rooms that it is served in may fail?

A room that failed for a reason that is not the client's is followed by a new one (`fresh-attempt`), on
another pair if there is one, with the tokens that were passed on as its `output`: a draw depends on the
request, its seed and its position alone, so the stream goes on as if nothing had happened. What the old room
still sends is not read. Choices that have ended are not drawn again.

A room that was retracted has not failed (`retracted-is-no-failure`): the next one costs no attempt, comes
without a pause, avoids nobody, and the request's own time is all that bounds how many there are.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from baton.api.backend import Hangup, Limits, NoWorker, Overloaded, RoomFailed, TokenBatch, client_gone
from baton.api.errors import CLIENT_GONE
from baton.api.http.backend_errors import from_backend
from baton.bootstrap.admission import QUEUED_GONE
from baton.bootstrap.history import NO_STATUS
from baton.bootstrap.outbox import Outbox
from baton.bootstrap.placement_request import QueueFull, Retry
from baton.bootstrap.room_controller import RoomController
from baton.bootstrap.room_stream import SIBLING_FAILED, RoomStream
from baton.fleet.placement import Need
from baton.fleet.retry import (
    RETRIED,
    RetryBounds,
    avoided_sides,
    made_progress,
    margin_tokens,
    may_retry,
    pause_s,
)
from baton.fleet.room_entry import RoomEntry
from baton.ids import Incarnation
from baton.rooms.errors import Cause, NoneReady, NoSuchWorker, Reason
from baton.rooms.phases import Side
from baton.rooms.reasons import LOST, REASONS
from baton.rooms.request import Request
from baton.rooms.timeline import Moment

GIVEN_UP: Final = {
    Hangup.CLIENT_GONE: ("the client hung up while it waited", CLIENT_GONE),
    Hangup.REQUEST_FAILED: (SIBLING_FAILED, NO_STATUS),
}
"""What is noted of a request that is cancelled while it waits for a room."""

ENOUGH: Final = "its reader had enough of it"
GIVEN_UP_BETWEEN: Final = {
    Hangup.STOP_STRING: (Moment.ANSWERED, ENOUGH),
    Hangup.CLIENT_GONE: (Moment.GIVEN_UP, "the client hung up"),
    Hangup.REQUEST_FAILED: (Moment.NOT_RETRIED, SIBLING_FAILED),
}
"""What is noted of a room that ended early, where its request is given up before the next one."""

Follow = Callable[[RoomEntry, Request, float], RoomStream]
"""Drive an opened room, for so many seconds at most."""


def reusable(request: Request) -> Sequence[int]:
    """What a worker may have of it already, of what was drawn, too: nothing of a prompt that is scored
    (`scored-is-computed`)."""
    return request.tokens if request.prompt_logprobs is None else ()


@dataclass(slots=True, eq=False)
class _Branch:
    """Choices that had one output when their room was opened, and share it."""

    choices: tuple[int, ...]
    """Of the request's, in the order of the room's."""
    room: RoomStream
    avoid: frozenset[Incarnation] = frozenset()
    opened: int = 1
    """Rooms in a row, this one included, before which none brought the choices further."""
    began: int = 0
    """Output tokens of each when the room was opened."""
    carrier: asyncio.Task[None] | None = None
    """Where the request has several strands, each has one."""
    over: bool = False
    """It has its last room, and it is told why none follows it."""
    paused_ms: int | None = None
    """Since when no token has come because a room was retracted."""


class RequestStream:
    """One request being served: a `baton.api.backend.TokenStream` over its rooms, one after another.

    All choices begin in one room. When a room fails, those of its choices that have the same output go on in
    one room, and others in others: a room has one beginning. As long as there is one room at a time, the next
    is opened when the reader has read all of the last one, and in the reader's own task: a client that hangs
    up meanwhile leaves nothing behind. Several rooms at a time are followed by tasks, which `hang_up` ends.
    """

    def __init__(
        self,
        rooms: RoomController,
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
        self._outputs: list[list[int]] = [[] for _ in range(request.choices)]
        self._going = set(range(request.choices))
        """Choices that are not whole, and of which the reader wants more."""
        self._enough: set[int] = set()
        """Choices of which it wants no more."""
        self._hung_up = False
        self._began = False
        """A token was passed on."""
        self._first = follow(entry, request, timeout_s)
        self._strand = _Branch(tuple(range(request.choices)), self._first)
        """The only one, until there are several."""
        self._strands = [self._strand]
        self._merged: Outbox[TokenBatch | Exception] | None = None
        """Of several strands."""

    async def next(self) -> TokenBatch:
        strand = self._strand
        while self._merged is None:
            try:
                batch = await strand.room.next()
            except RoomFailed as failure:
                await self._go_on(strand, failure)
                continue
            if (passed := self._passed(strand, batch)) is not None:
                return passed
        return await self._next_of_several(self._merged)

    def end_choice(self, choice: int) -> None:
        self._enough.add(choice)
        self._going.discard(choice)
        for strand in self._strands:
            if choice in strand.choices:
                strand.room.end_choice(strand.choices.index(choice))
                if strand.carrier is not None and self._going.isdisjoint(strand.choices):
                    self._give_up(strand, Moment.GIVEN_UP, ENOUGH)
                    strand.carrier.cancel()

    async def hang_up(self, why: Hangup) -> None:
        self._hung_up = True
        for strand in self._strands:
            self._give_up(strand, *GIVEN_UP_BETWEEN[why])
            await strand.room.hang_up(why)
        carriers = [strand.carrier for strand in self._strands if strand.carrier is not None]
        for carrier in carriers:
            carrier.cancel()
        await asyncio.gather(*carriers, return_exceptions=True)

    # ---- what comes

    def _passed(self, strand: _Branch, batch: TokenBatch) -> TokenBatch | None:
        """What the reader gets of a batch of the strand's room; None: it wants no more of the choice."""
        if not self._began:
            self._began, self._first = True, strand.room
        self.cached_tokens = self._first.cached_tokens
        self._end_pause(strand, len(self._request.prompt) + strand.began - strand.room.cached_tokens)
        self._rooms.admission.expected.progressed(strand.room.entry.id, len(batch.tokens))
        choice = strand.choices[batch.choice]
        if choice not in self._going:
            return None
        self._outputs[choice] += [token.id for token in batch.tokens]
        if batch.finish is not None:
            self._going.discard(choice)
        return batch if choice == batch.choice else batch._replace(choice=choice)

    async def _next_of_several(self, merged: Outbox[TokenBatch | Exception]) -> TokenBatch:
        while True:
            told = await merged.get()
            if isinstance(told, Exception):
                await self.hang_up(Hangup.REQUEST_FAILED)
                raise told
            if told.choice not in self._enough:
                return told

    async def _carry(self, strand: _Branch, cause: Cause, merged: Outbox[TokenBatch | Exception]) -> None:
        """Bring one of several strands to its end, and pass on what comes of it."""
        try:
            await self._open(strand, cause)
            while not self._going.isdisjoint(strand.choices):
                try:
                    batch = await strand.room.next()
                except RoomFailed as failure:
                    if not await self._go_on(strand, failure):
                        return
                    continue
                if (passed := self._passed(strand, batch)) is not None:
                    merged.put(passed)
        except Exception as error:
            merged.put(error)

    # ---- from room to room

    async def _go_on(self, strand: _Branch, failure: RoomFailed) -> bool:
        """In the next room, or in several: then the strand is no more, and this is False. Raises the cause of
        the last room's failure where its choices do not go on."""
        try:
            cause = self._judged(strand, failure)
        except RoomFailed:
            self._rooms.admission.settle(strand.room.entry.id)
            raise
        alike: dict[tuple[int, ...], list[int]] = {}
        for choice in strand.choices:
            if choice in self._going:
                alike.setdefault(tuple(self._outputs[choice]), []).append(choice)
        if len(alike) == 1:
            [choices] = alike.values()
            strand.choices = tuple(choices)
            await self._open(strand, cause)
            return True
        if self._merged is None:
            # At most a batch a token, and one error of each strand.
            self._merged = Outbox(self._request.choices * (self._request.max_tokens + 1))
        self._strands.remove(strand)
        if not alike:
            self._rooms.admission.settle(strand.room.entry.id)
        for choices in alike.values():
            part = replace(strand, choices=tuple(choices), carrier=None)
            strand.paused_ms = None  # one of them tells how long the pause was
            self._strands.append(part)
            part.carrier = asyncio.create_task(self._carry(part, cause, self._merged))
        return False

    def _judged(self, strand: _Branch, failure: RoomFailed) -> Cause:
        """Why the strand's room ended. Raises RoomFailed where no other follows it."""
        failed, cause, left_s = strand.room.entry, strand.room.cause, self._left_s()
        if cause is None or self._hung_up:
            raise failure
        if not REASONS[cause.reason].is_attempt and strand.paused_ms is None:
            strand.paused_ms = failed.closing_ms
        if made_progress(sum(len(self._outputs[choice]) - strand.began for choice in strand.choices)):
            strand.opened = 1
        pause = self._pause_s(strand, cause)
        if not may_retry(cause.reason, strand.opened, left_s - pause, self._bounds):
            if not REASONS[cause.reason].is_attempt:
                raise self._without_another(strand, cause, TimeoutError())
            strand.over = True
            if cause.reason in RETRIED:
                rooms = f"{strand.opened} of {self._bounds.rooms_max} rooms in a row tried"
                had = f"{rooms}, {max(left_s, 0.0):.1f} s left"
                self._rooms.not_retried(failed.id, had)
            raise failure
        guilt = avoided_sides(cause.reason, strand.room.reporter)
        strand.avoid |= {failed.worker(side).incarnation for side in guilt.intersection(failed.sides)}
        return cause

    async def _open(self, strand: _Branch, cause: Cause) -> None:
        """The strand's next room, behind the one that failed for this cause."""
        failed, left_s = strand.room.entry, self._left_s()
        request = self._request_of(strand)
        need = Need(request.prefill_tokens, request.tokens_max, choices=request.choices)
        fits = all(need.positions_on(worker) <= worker.tokens_max for worker in failed.workers)
        pause = self._pause_s(strand, cause)
        left = request.max_tokens - len(request.output)
        margin = margin_tokens(cause.reason, request.prefill_tokens, left, request.choices)
        decode = failed.decode.incarnation
        is_attempt = REASONS[cause.reason].is_attempt
        goes_back = not is_attempt or (failed.is_returned and decode not in strand.avoid)
        back = decode if goes_back else None
        retry = Retry(failed.id, cause.reason, strand.avoid, self._bounds.wait_s, pause, fits, margin, back)
        try:
            async with asyncio.timeout(left_s):
                entry = await self._rooms.admission.admit(
                    request.request_id,
                    request.prefill_tokens,
                    request.tokens_max,
                    retry,
                    reusable(request),
                    request.salt,
                    request.trace,
                    choices=request.choices,
                    priority=request.priority,
                    tenant=request.tenant,
                    arrived_ms=request.arrived_ms,
                    may_be_local=request.prompt_logprobs is None,
                    scores=request.scores,
                )
        except (NoSuchWorker, QueueFull, TimeoutError) as error:
            raise self._without_another(strand, cause, error) from error
        if self._hung_up:
            self._rooms.admission.discard(entry, QUEUED_GONE)
            raise RoomFailed(cause.text, cause.reason)
        wanted = tuple(choice for choice in strand.choices if choice in self._going)
        if wanted != strand.choices:  # the reader ended others meanwhile
            strand.choices = wanted
            request = self._request_of(strand)
        strand.opened += REASONS[cause.reason].is_attempt
        strand.began = len(request.output)
        strand.room = self._follow(entry, request, max(self._left_s(), 0.0))

    def _without_another(self, strand: _Branch, cause: Cause, error: Exception) -> RoomFailed:
        """What the reader hears where its request would go on, and no room was to be had for it."""
        why = str(error) or "no pair of workers had space in time"
        strand.over = True
        self._rooms.not_retried(strand.room.entry.id, why)
        self._end_pause(strand)
        if REASONS[cause.reason].is_attempt:
            return RoomFailed(f"{cause.text}; not retried: {why}", cause.reason)
        text = f"it waited to go on, since its worker needed its pages: {why}"
        match error:
            case TimeoutError():
                return RoomFailed(text, Reason.DEADLINE)
            case NoneReady(side=side):
                return RoomFailed(text, LOST[side])
            case _:
                return RoomFailed(text, Reason.REFUSED)

    def _give_up(self, strand: _Branch, word: Moment, text: str) -> None:
        """Its reader wants no more of it: said of its room, where that has ended and no other has begun."""
        self._rooms.admission.settle(strand.room.entry.id)
        if strand.room.cause is None or strand.over:
            return
        strand.over = True
        self._rooms.timelines.report(strand.room.entry.id, word, f"{text} while it waited for another room")
        self._end_pause(strand)

    def _end_pause(self, strand: _Branch, recomputed_tokens: int = 0) -> None:
        """A token has come, or none will, of a strand whose room may have been retracted."""
        since_ms, strand.paused_ms = strand.paused_ms, None
        if since_ms is not None:
            self._rooms.resumed(since_ms, recomputed_tokens)

    def _request_of(self, strand: _Branch) -> Request:
        """What is left of the request to its choices, which have one output."""
        seeds = (self._request.sampling.seed, *self._request.further_seeds)
        seed, *further = [seeds[choice] for choice in strand.choices]
        output = tuple(self._outputs[strand.choices[0]])
        sampling = replace(self._request.sampling, seed=seed)
        request = replace(self._request, output=output, sampling=sampling, further_seeds=tuple(further))
        # The prompt's scores came with the first token, all of them (`scored-once`).
        return replace(request, prompt_logprobs=None) if self._began else request

    def _pause_s(self, strand: _Branch, cause: Cause) -> float:
        seed = (self._request.sampling.seed, *self._request.further_seeds)[strand.choices[0]]
        return pause_s(cause.reason, strand.opened, seed, self._request.request_id)

    def _left_s(self) -> float:
        return self._ends_s - asyncio.get_running_loop().time()


class RoomBackend:
    """The API's backend: admission, and a stream over as many rooms as it takes."""

    def __init__(
        self,
        rooms: RoomController,
        context_tokens: int,
        timeout_s: float,
        bounds: RetryBounds = RetryBounds(),  # noqa: B008 - frozen
    ) -> None:
        self._rooms = rooms
        self._context_tokens = context_tokens
        self._timeout_s = timeout_s
        self._bounds = bounds
        self._limits = Limits(context_tokens, 0, 0)
        self._as_of = -1
        """Of the registry's changes."""

    def limits(self) -> Limits:
        changes = self._rooms.registry.changes
        if changes != self._as_of:
            self._as_of, self._limits = changes, self._reckoned()
        return self._limits

    def _reckoned(self) -> Limits:
        registry = self._rooms.registry
        return Limits(
            self._context_tokens,
            registry.tokens_max(Side.PREFILL),
            registry.tokens_max(Side.DECODE),
            registry.tokens_max_now(Side.DECODE),
            registry.decode_page_tokens,
            registry.quantize,
            registry.tokens_max_alone,
        )

    async def generate(self, request: Request, why: Callable[[], Hangup] = client_gone) -> RequestStream:
        since_ms = self._rooms.clock.now_ms()
        limits = self.limits()
        most = max(limits.prompt_tokens, limits.alone_tokens)
        request = replace(request, arrived_ms=self._rooms.clock.wall_ms(), carried_tokens_max=most)
        try:
            entry = await self._rooms.admission.admit(
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
            told, status = GIVEN_UP[why()]
            self._note_refused(request, told, status, since_ms)
            raise
        except NoSuchWorker as error:
            none = NoWorker(str(error))
            self._note_refused(request, str(error), from_backend(none).status, since_ms)
            raise none from error
        except (QueueFull, TimeoutError) as error:
            full = str(error) or "no pair of workers had space in time"
            after_s = self._rooms.admission.retry_after_s(request.priority, request.tenant)
            busy = Overloaded(f"every worker is busy: {full}", after_s)
            self._note_refused(request, full, from_backend(busy).status, since_ms)
            raise busy from error
        return RequestStream(self._rooms, self._drive, entry, request, self._timeout_s, self._bounds)

    def _note_refused(self, request: Request, why: str, status: int, since_ms: int) -> None:
        """A request that came at `since_ms` gets no room; its client is told so with `status`."""
        clock = self._rooms.clock
        waited_ms = clock.now_ms() - since_ms
        self._rooms.history.refuse(request.request_id, why, status, clock.wall_ms(), waited_ms)

    def follow(self, entry: RoomEntry, request: Request) -> RoomStream:
        """Drive one opened room, and no other when it fails."""
        return self._drive(entry, request, self._timeout_s)

    def _drive(self, entry: RoomEntry, request: Request, timeout_s: float) -> RoomStream:
        stream = RoomStream(self._rooms, entry, request, timeout_s)
        stream.start()
        return stream
