"""Stream of one request's tokens over its rooms, any of which may fail.

A room that failed through no fault of the client is followed by a new one (`fresh-attempt`), on another pair
of workers if there is one. The tokens passed on so far become the new room's `output`. A draw depends on the
request, its seed and its position alone, so the stream goes on as if nothing had happened. Later messages of
the old room are not read. Choices that have ended are not sampled again.

A retracted room has not failed (`retracted-is-no-failure`). The next one does not count as an attempt, comes
without a pause and avoids no worker. Only the request's own time-out limits their number.

A room that a full worker refused has not failed either (`full-is-no-failure`). Its request waits for a place
as it did before that room: in the queue's time if it had no other room, and as a retried request otherwise.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

from baton.api.backend import BackendError, Hangup, RoomFailed
from baton.bootstrap.admission.placement_request import QueueFull, Retry
from baton.bootstrap.admission.refusals import NO_SPACE, not_placed
from baton.bootstrap.outbox import Outbox
from baton.bootstrap.room_controller import RoomController
from baton.bootstrap.room_stream import SIBLING_FAILED, RoomStream
from baton.fleet.need import Need
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
from baton.rooms.reasons import LOST, REASONS
from baton.rooms.request import Request, TokenBatch
from baton.rooms.timeline import Moment

ENOUGH: Final = "its reader had enough of it"
GIVEN_UP_BETWEEN: Final = {
    Hangup.STOP_STRING: (Moment.ANSWERED, ENOUGH),
    Hangup.CLIENT_GONE: (Moment.GIVEN_UP, "the client hung up"),
    Hangup.REQUEST_FAILED: (Moment.NOT_RETRIED, SIBLING_FAILED),
}
"""Event and text for the timeline of the last room of a request that is given up before its next room opens,
by reason."""

TOKEN_ID: Final = attrgetter("id")

Follow = Callable[[RoomEntry, Request, float], RoomStream]
"""Function that starts the stream of an opened room. It takes the room, the request and the room's time limit
in seconds."""


def reusable(request: Request) -> Sequence[int]:
    """Return the tokens (prompt and output) whose KV a worker may have cached. Empty if the prompt is scored,
    since then it is computed whole (`scored-is-computed`)."""
    return request.tokens if request.prompt_logprobs is None else ()


@dataclass(slots=True, eq=False)
class _Branch:
    """Choices of a request that share a room, because their outputs were equal when it was opened."""

    choices: tuple[int, ...]
    """Indices, in the request's response, of the choices that share one room. The room numbers them from 0 in
    this order."""
    room: RoomStream
    avoid: frozenset[Incarnation] = frozenset()
    opened: int = 1
    """Number of the branch's rooms in a row, up to the present one, that made no progress."""
    began: int = 0
    """Number of output tokens that each choice already had when the room was opened."""
    carrier: asyncio.Task[None] | None = None
    """Task that reads the rooms of this branch (choices that share a room). None while all choices of the
    request are in one room."""
    over: bool = False
    """Whether no other room follows the present one. The reason is in the room's timeline."""
    cause: Cause | None = None
    """Cause for which the last room ended that no full worker refused. None if there was none."""
    retry: Retry | None = None
    """Facts with which the present room was placed. None for the request's first room."""
    paused_ms: int | None = None
    """Time in milliseconds at which the choices paused, because their room was retracted (preempted). None
    when the next token has come."""


class RequestStream:
    """Stream of a request's tokens: a `baton.api.backend.TokenStream` over its rooms, one after another.

    All choices begin in one room. When a room fails, its choices continue in new rooms: one room for all that
    have the same output, since a room has one beginning. While there is one room at a time, the next is
    opened in the reader's own task, after the reader has read all of the last one. So a client that hangs up
    meanwhile leaves nothing behind. Several rooms at a time are read by tasks, which `hang_up` ends.
    """

    def __init__(
        self,
        rooms: RoomController,
        follow: Follow,
        first: RoomStream,
        request: Request,
        timeout_s: float,
        bounds: RetryBounds,
        queue_ends_s: float,
    ) -> None:
        """Make the stream. `first`: stream of the first room. `queue_ends_s`: time of the event loop in
        seconds, until which the request may wait for a place if full workers refuse its rooms."""
        self._rooms = rooms
        self._expected = rooms.admission.expected
        self._follow = follow
        self._request = request
        self._bounds = bounds
        self._ends_s = asyncio.get_running_loop().time() + timeout_s
        self._queue_ends_s = queue_ends_s
        self._outputs: list[list[int]] = [[] for _ in range(request.choices)]
        self._going = set(range(request.choices))
        """Indices of the choices that are not complete and whose tokens the reader still wants."""
        self._enough: set[int] = set()
        """Indices of the choices of which the reader wants no more tokens."""
        self._hung_up = False
        self._began = False
        """Whether the first token was passed on to the reader."""
        self._first = first
        self._branch = _Branch(tuple(range(request.choices)), self._first)
        """Branch with all choices of the request, as long as one room serves them all."""
        self._branches = [self._branch]
        self._merged: Outbox[TokenBatch | Exception] | None = None
        """Queue that merges the tokens of several rooms for the reader. None while all choices are in one
        room."""

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens whose KV was taken from a prefix cache. Known after the first batch."""
        return self._first.cached_tokens

    async def next(self) -> TokenBatch:
        strand = self._branch
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
        for strand in self._branches:
            if choice in strand.choices:
                strand.room.end_choice(strand.choices.index(choice))
                if strand.carrier is not None and self._going.isdisjoint(strand.choices):
                    self._give_up(strand, Moment.GIVEN_UP, ENOUGH)
                    strand.carrier.cancel()

    async def hang_up(self, why: Hangup) -> None:
        self._hung_up = True
        for strand in self._branches:
            self._give_up(strand, *GIVEN_UP_BETWEEN[why])
            await strand.room.hang_up(why)
        carriers = [strand.carrier for strand in self._branches if strand.carrier is not None]
        for carrier in carriers:
            carrier.cancel()
        await asyncio.gather(*carriers, return_exceptions=True)

    # ---- what comes

    def _passed(self, strand: _Branch, batch: TokenBatch) -> TokenBatch | None:
        """Convert a batch of tokens of a room into one for the reader, with the choice's index in the
        response. Return None if the reader wants no more of that choice."""
        tokens, finish, index, _ = batch
        if not self._began:
            self._began, self._first = True, strand.room
        if strand.paused_ms is not None:
            self._end_pause(strand, len(self._request.prompt) + strand.began - strand.room.cached_tokens)
        self._expected.progressed(strand.room.entry.id, len(tokens))
        choice = strand.choices[index]
        if choice not in self._going:
            return None
        self._outputs[choice] += map(TOKEN_ID, tokens)
        if finish is not None:
            self._going.discard(choice)
        return batch if choice == index else batch._replace(choice=choice)

    async def _next_of_several(self, merged: Outbox[TokenBatch | Exception]) -> TokenBatch:
        while True:
            item = await merged.get()
            if isinstance(item, Exception):
                await self.hang_up(Hangup.REQUEST_FAILED)
                raise item
            if item.choice not in self._enough:
                return item

    async def _carry(self, strand: _Branch, cause: Cause, merged: Outbox[TokenBatch | Exception]) -> None:
        """Read the rooms of one branch (choices that share a room), one after the other, and put its tokens
        into `merged`. Used if a request has several branches."""
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
        """Continue a branch (choices that share a room) in the next room, or in several rooms if its choices
        have different outputs.

        Return False if the branch was split. Raises BackendError if its choices do not go on.
        """
        try:
            cause = self._judged(strand, failure)
        except BackendError:
            self._rooms.admission.promises.withdraw(strand.room.entry.id)
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
            # At most one batch for each token, and one error for each branch.
            self._merged = Outbox(self._request.choices * (self._request.max_tokens + 1))
        self._branches.remove(strand)
        if not alike:
            self._rooms.admission.promises.withdraw(strand.room.entry.id)
        for choices in alike.values():
            part = replace(strand, choices=tuple(choices), carrier=None)
            strand.paused_ms = None  # one of the parts records the length of the pause
            self._branches.append(part)
            part.carrier = asyncio.create_task(self._carry(part, cause, self._merged))
        return False

    def _judged(self, strand: _Branch, failure: RoomFailed) -> Cause:
        """Decide whether another room follows after the room of a branch (choices that share a room) has
        ended. Return the cause of its end if so. Raises BackendError if none follows."""
        failed, cause, left_s = strand.room.entry, strand.room.cause, self.left_s()
        if cause is None or self._hung_up:
            raise failure
        if cause.reason is not Reason.WORKER_FULL:
            strand.cause = cause
        if cause.reason is Reason.RETRACTED and strand.paused_ms is None:
            strand.paused_ms = failed.closing_ms
        if made_progress(sum(len(self._outputs[choice]) - strand.began for choice in strand.choices)):
            strand.opened = 1
        pause = self._pause_s(strand, cause)
        if not may_retry(cause.reason, strand.opened, left_s - pause, self._bounds):
            if not REASONS[cause.reason].is_attempt:
                raise self._without_another(strand, TimeoutError())
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
        """Open the next room of a branch (choices that share a room). `cause`: reason for which the present
        room ended."""
        request = self._request_of(strand)
        retry = strand.retry = self._retry_of(strand, cause, request)
        try:
            async with asyncio.timeout(self.left_s()):
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
            raise self._without_another(strand, error) from error
        if self._hung_up:
            self._rooms.admission.discard(entry)
            raise RoomFailed(cause.text, cause.reason)
        wanted = tuple(choice for choice in strand.choices if choice in self._going)
        if wanted != strand.choices:  # the reader ended others meanwhile
            strand.choices = wanted
            request = self._request_of(strand)
        strand.opened += REASONS[cause.reason].is_attempt
        strand.began = len(request.output)
        strand.room = self._follow(entry, request, max(self.left_s(), 0.0))

    def _retry_of(self, strand: _Branch, cause: Cause, request: Request) -> Retry:
        """Return the facts for the placement of a branch's next room. `cause`: reason for which the present
        room ended. `request`: the unfinished part of the request."""
        failed, wait_s = strand.room.entry, self._bounds.wait_s
        if cause.reason is Reason.WORKER_FULL:
            if strand.retry is not None:
                return replace(strand.retry, room=failed.id, pause_s=0.0, fit_before=True, is_refused=True)
            until_s = self._queue_ends_s
            return Retry(failed.id, cause.reason, strand.avoid, wait_s, is_refused=True, until_s=until_s)
        need = Need(request.prefill_tokens, request.tokens_max, choices=request.choices)
        fits = all(need.positions_on(worker) <= worker.tokens_max for worker in failed.workers)
        pause = self._pause_s(strand, cause)
        left = request.max_tokens - len(request.output)
        margin = margin_tokens(cause.reason, request.prefill_tokens, left, request.choices)
        decode = failed.decode.incarnation
        is_attempt = REASONS[cause.reason].is_attempt
        goes_back = not is_attempt or (failed.is_returned and decode not in strand.avoid)
        back = decode if goes_back else None
        return Retry(failed.id, cause.reason, strand.avoid, wait_s, pause, fits, margin, back)

    def _without_another(
        self, strand: _Branch, error: NoSuchWorker | QueueFull | TimeoutError
    ) -> BackendError:
        """Return the error with which a request's stream ends, if the request could have continued but got no
        other room."""
        cause, why = strand.cause, str(error) or NO_SPACE
        strand.over = True
        self._rooms.not_retried(strand.room.entry.id, why)
        self._end_pause(strand)
        if cause is None:
            return not_placed(self._rooms.admission, self._request, error)
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
        """Record in the last room's timeline that the reader wants no more, if no other room was opened after
        it."""
        self._rooms.admission.promises.withdraw(strand.room.entry.id)
        if strand.room.cause is None or strand.over:
            return
        strand.over = True
        self._rooms.timelines.report(strand.room.entry.id, word, f"{text} while it waited for another room")
        self._end_pause(strand)

    def _end_pause(self, strand: _Branch, recomputed_tokens: int = 0) -> None:
        """Record the length of a branch's pause in the metrics. A pause lasts from the retraction of its room
        until its next token, or its end."""
        since_ms, strand.paused_ms = strand.paused_ms, None
        if since_ms is not None:
            self._rooms.resumed(since_ms, recomputed_tokens)

    def _request_of(self, strand: _Branch) -> Request:
        """Return the unfinished part of the request for one branch (choices that share a room), as a request
        for a new room. The tokens so far are its earlier output."""
        seeds = (self._request.sampling.seed, *self._request.further_seeds)
        seed, *further = [seeds[choice] for choice in strand.choices]
        output = tuple(self._outputs[strand.choices[0]])
        sampling = replace(self._request.sampling, seed=seed)
        request = replace(self._request, output=output, sampling=sampling, further_seeds=tuple(further))
        # All scores of the prompt came with the first token (`scored-once`).
        return replace(request, prompt_logprobs=None) if self._began else request

    def _pause_s(self, strand: _Branch, cause: Cause) -> float:
        seed = (self._request.sampling.seed, *self._request.further_seeds)[strand.choices[0]]
        return pause_s(cause.reason, strand.opened, seed, self._request.request_id)

    def left_s(self) -> float:
        return self._ends_s - asyncio.get_running_loop().time()
