"""Reads a request's tokens from the backend, and passes them on, whatever goes wrong.

A stream that was opened is always ended: by its last batch, or by one `hang_up` when a stop string is
complete, the client is gone, the task is cancelled, or a sibling prompt failed. A request of several
prompts succeeds or fails as a whole. All choices of a prompt are read from one stream, and a stop string
ends its own choice alone.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NotRequired

from typing_extensions import TypedDict

from baton.api.backend import Backend, Hangup, TokenStream
from baton.api.generation.choice_assembler import ChoiceAssembler, Delta
from baton.api.http.disconnect import ClientGone
from baton.api.http.metrics import HttpMetrics
from baton.telemetry.histogram import LoopHistogram

Emit = Callable[[ChoiceAssembler, Delta], Awaitable[None]]


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    reasoning_tokens: int


class TokenUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptDetails]
    completion_tokens_details: NotRequired[CompletionDetails]
    reasoning_tokens: NotRequired[int]
    """The same as in the details."""


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = field(default=0)
    reasoning_tokens: int | None = None
    """None: reasoning is not separated from answers."""

    def add(self, choices: Sequence[ChoiceAssembler], cached_tokens: int) -> None:
        """Add the choices of one prompt, which have ended."""
        self.cached_tokens += cached_tokens
        for choice in choices:
            self.completion_tokens += choice.output_tokens
            if choice.counts_reasoning:
                self.reasoning_tokens = (self.reasoning_tokens or 0) + choice.reasoning_tokens

    def rendered(self) -> TokenUsage:
        counts = counted(self.prompt_tokens, self.completion_tokens)
        counts["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        if self.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
            counts["reasoning_tokens"] = self.reasoning_tokens  # where SGLang has it
        return counts


def counted(prompt_tokens: int, completion_tokens: int) -> TokenUsage:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class TokenPace:
    """Latencies of one sequence's tokens."""

    __slots__ = ("_first", "_first_token", "_inter_token", "_last_s")

    def __init__(self, first_token: LoopHistogram, inter_token: LoopHistogram, received_s: float) -> None:
        self._first_token = first_token
        self._inter_token = inter_token
        self._last_s = received_s
        self._first = True

    def note(self, tokens: int) -> None:
        """Record `tokens` that came together now. They share the time since the tokens before."""
        if tokens == 0:
            return
        now_s = time.perf_counter()
        gap_s = now_s - self._last_s
        self._last_s = now_s
        if self._first:
            self._first = False
            self._first_token.observe(gap_s)
            return
        self._inter_token.observe(gap_s / tokens, tokens)


async def answer(
    backend: Backend, choices: Sequence[ChoiceAssembler], metrics: HttpMetrics, received_s: float, emit: Emit
) -> Usage:
    """Run every choice to its end and `emit` each delta, in order within a choice.

    `choices`: those of one prompt are neighbours, in their order. `received_s`: arrival of the HTTP
    request, by `time.perf_counter`. `emit`: called by one task at a time. Raises BackendError, or what
    `emit` raises. By then every stream is ended.
    """
    requests = by_request(choices)
    pass_on = emit if len(requests) == 1 else _in_turn(emit)
    usage = Usage(prompt_tokens=sum(len(own[0].request.prompt) for own in requests))
    why = Hangup.CLIENT_GONE
    """Why choices are cancelled: the client is gone, until one choice fails and takes the others with it."""

    async def run(own: Sequence[ChoiceAssembler]) -> None:
        nonlocal why
        stream: TokenStream | None = None
        try:
            paces = [TokenPace(metrics.first_token, metrics.inter_token, received_s) for _ in own]
            stream = await backend.generate(own[0].request, lambda: why)
            await _read(
                stream,
                own,
                paces,
                pass_on,
            )
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError | ClientGone):
                why = Hangup.REQUEST_FAILED
            if stream is not None:
                await asyncio.shield(stream.hang_up(why))
            raise
        usage.add(own, stream.cached_tokens)

    if len(requests) == 1:
        await run(requests[0])
        return usage
    try:
        async with asyncio.TaskGroup() as group:
            for own in requests:
                group.create_task(run(own))
    except BaseExceptionGroup as several:
        raise _first(several) from None
    return usage


async def _read(
    stream: TokenStream, own: Sequence[ChoiceAssembler], paces: Sequence[TokenPace], pass_on: Emit
) -> None:
    """Read the stream until each of its choices has ended."""
    unfinished = len(own)
    while unfinished:
        batch = await stream.next()
        choice = own[batch.choice]
        paces[batch.choice].note(len(batch.tokens))
        delta = choice.take(batch)
        if choice.stopped and batch.finish is None:
            if unfinished == 1:
                await stream.hang_up(Hangup.STOP_STRING)
            else:
                stream.end_choice(batch.choice)
        await pass_on(choice, delta)
        if delta.finish is not None:
            choice.finish = delta.finish
            unfinished -= 1


def by_request(choices: Iterable[ChoiceAssembler]) -> list[list[ChoiceAssembler]]:
    """Return the choices of each request."""
    return [list(own) for _, own in groupby(choices, key=lambda choice: id(choice.request))]


def _in_turn(emit: Emit) -> Emit:
    """Return `emit`, for several tasks that take turns."""
    turn = asyncio.Lock()

    async def emit_in_turn(choice: ChoiceAssembler, delta: Delta) -> None:
        async with turn:
            await emit(choice, delta)

    return emit_in_turn


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    first = several.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
