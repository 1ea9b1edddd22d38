"""Reader of the output tokens of one HTTP request, from the backend's streams into its choices.

Each prompt has one token stream, from which all choices of the prompt are read. A stop string ends only the
choice that contains it. A request with several prompts succeeds or fails as a whole. Every opened stream is
ended: by its last batch, or by one `hang_up`. That is called when stop strings ended all choices, the client
disconnected, the task is cancelled, or another prompt failed.
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
from baton.rooms.request import TokenBatch
from baton.telemetry.histogram import LoopHistogram

Emit = Callable[[ChoiceAssembler, Delta, bool], Awaitable[None]]
"""Function that gets each delta of a choice. The flag says whether the next delta of the choice is there
already, so that both may be sent together."""
Split = Callable[[ChoiceAssembler, TokenBatch], Iterable[TokenBatch]]
"""Function that returns a batch of several tokens as the parts from which deltas are made. Each part is taken
after the delta of the one before was passed on."""


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
    """Number of reasoning tokens, in the field in which SGLang reports it. `completion_tokens_details` holds
    the same number."""


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request, summed over its prompts and all their choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = field(default=0)
    reasoning_tokens: int | None = None
    """Number of output tokens that are reasoning. None: reasoning is not separated from answers."""

    def add(self, choices: Sequence[ChoiceAssembler], cached_tokens: int) -> None:
        """Add the token counts of one prompt's choices, after they have ended. `cached_tokens`: tokens of the
        prompt whose KV came from a prefix cache."""
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
    """Recorder of one choice's time to first token and inter-token latencies, in two histograms."""

    __slots__ = ("_first", "_first_token", "_inter_token", "_last_s")

    def __init__(self, first_token: LoopHistogram, inter_token: LoopHistogram, received_s: float) -> None:
        self._first_token = first_token
        self._inter_token = inter_token
        self._last_s = received_s
        self._first = True

    def note(self, tokens: int) -> None:
        """Record that a batch of tokens has arrived now, for the latency histograms. The time since the
        previous batch is divided evenly among the tokens.

        `tokens`: number of tokens in the batch.
        """
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
    backend: Backend,
    choices: Sequence[ChoiceAssembler],
    metrics: HttpMetrics,
    received_s: float,
    emit: Emit,
    split: Split,
) -> Usage:
    """Generate every choice of a request to its end, and return the request's token usage.

    Each delta of a choice is passed to `emit`, in order, and by one task at a time. `choices`: all choices of
    the request, grouped by prompt. `received_s`: time at which the HTTP request arrived, in seconds of
    `time.perf_counter`. Raises BackendError, or any error of `emit`, after every stream was ended.
    """
    requests = by_request(choices)
    pass_on = emit if len(requests) == 1 else _in_turn(emit)
    usage = Usage(prompt_tokens=sum(len(own[0].request.prompt) for own in requests))
    why = Hangup.CLIENT_GONE
    """Reason that is given when a token stream is hung up. It is REQUEST_FAILED after one prompt of the HTTP
    request has failed."""

    async def run(own: Sequence[ChoiceAssembler]) -> None:
        nonlocal why
        stream: TokenStream | None = None
        try:
            paces = [TokenPace(metrics.first_token, metrics.inter_token, received_s) for _ in own]
            stream = await backend.generate(own[0].request, lambda: why)
            await _read(stream, own, paces, pass_on, split)
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
    stream: TokenStream,
    own: Sequence[ChoiceAssembler],
    paces: Sequence[TokenPace],
    pass_on: Emit,
    split: Split,
) -> None:
    """Read one prompt's token stream until each of its choices has ended, and pass on every delta. `own`: the
    choices of the prompt. `paces`: latency recorder of each choice."""
    unfinished = len(own)
    while unfinished:
        batch = await stream.next()
        choice = own[batch.choice]
        paces[batch.choice].note(len(batch.tokens))
        left = len(batch.tokens)
        for part in (batch,) if left <= 1 else split(choice, batch):
            delta = choice.take(part)
            if choice.stopped and batch.finish is None:
                if unfinished == 1:
                    await stream.hang_up(Hangup.STOP_STRING)
                else:
                    stream.end_choice(batch.choice)
            left -= len(part.tokens)
            await pass_on(choice, delta, left > 0 and delta.finish is None)
            if delta.finish is not None:
                choice.finish = delta.finish
                unfinished -= 1
                break


def whole_batch(_: ChoiceAssembler, batch: TokenBatch) -> Iterable[TokenBatch]:
    return (batch,)


def by_request(choices: Iterable[ChoiceAssembler]) -> list[list[ChoiceAssembler]]:
    """Return the choices grouped by worker request, which is one for each prompt. `choices`: all choices of
    an HTTP request, in which those of one prompt are adjacent."""
    return [list(own) for _, own in groupby(choices, key=lambda choice: id(choice.request))]


def _in_turn(emit: Emit) -> Emit:
    """Return `emit` wrapped in a lock, so that only one task at a time runs it."""
    turn = asyncio.Lock()

    async def emit_in_turn(choice: ChoiceAssembler, delta: Delta, more: bool) -> None:
        async with turn:
            await emit(choice, delta, more)

    return emit_in_turn


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    first = several.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
