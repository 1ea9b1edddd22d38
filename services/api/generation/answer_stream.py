"""How do a request's tokens get from the backend to whoever renders them, whatever goes wrong?

A stream that was opened is always ended: by its last batch, or by one `hang_up` when a stop string is
complete, the client is gone, the task is cancelled, or a sibling prompt failed. A request of several
prompts succeeds or fails as a whole. All choices of a prompt are read from one stream, and a stop string ends
its own alone.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from baton.api.backend import Backend, Hangup, TokenStream
from baton.api.generation.choice_assembler import ChoiceAssembler, Delta
from baton.api.http.disconnect import ClientGone
from baton.api.http.metrics import HttpMetrics, TokenPace

Emit = Callable[[ChoiceAssembler, Delta], Awaitable[None]]


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = field(default=0)
    reasoning_tokens: int | None = None
    """None: thoughts are not told from answers."""

    def add(self, choices: Sequence[ChoiceAssembler], cached_tokens: int) -> None:
        """Those of one prompt, which have ended."""
        self.cached_tokens += cached_tokens
        for choice in choices:
            self.completion_tokens += choice.output_tokens
            if choice.tells_thoughts:
                self.reasoning_tokens = (self.reasoning_tokens or 0) + choice.reasoning_tokens

    def rendered(self) -> dict[str, object]:
        counts = counted(self.prompt_tokens, self.completion_tokens)
        counts["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        if self.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
            counts["reasoning_tokens"] = self.reasoning_tokens  # SGLang's place
        return counts


def counted(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


async def answer(
    backend: Backend, choices: Sequence[ChoiceAssembler], metrics: HttpMetrics, received_s: float, emit: Emit
) -> Usage:
    """Run every choice to its end and `emit` each delta, in order within a choice. Neighbours of one request
    are its choices, in their order.

    `received_s` is when the HTTP request came in, by `time.perf_counter`. `emit` is called by one task at a
    time. Raises BackendError, or what `emit` raises; by then every stream is ended.
    """
    asked = by_request(choices)
    pass_on = emit if len(asked) == 1 else _in_turn(emit)
    usage = Usage(prompt_tokens=sum(len(own[0].request.prompt) for own in asked))
    why = Hangup.CLIENT_GONE
    """What a cancelled choice is cancelled for, until a choice failed by itself: the others go with it."""

    async def run(own: Sequence[ChoiceAssembler]) -> None:
        nonlocal why
        stream: TokenStream | None = None
        try:
            stream = await backend.generate(own[0].request, lambda: why)
            await _read(stream, own, [metrics.pace(received_s) for _ in own], pass_on)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError | ClientGone):
                why = Hangup.REQUEST_FAILED
            if stream is not None:
                await asyncio.shield(stream.hang_up(why))
            raise
        usage.add(own, stream.cached_tokens)

    if len(asked) == 1:
        await run(asked[0])
        return usage
    try:
        async with asyncio.TaskGroup() as group:
            for own in asked:
                group.create_task(run(own))
    except BaseExceptionGroup as several:
        raise _first(several) from None
    return usage


async def _read(
    stream: TokenStream, own: Sequence[ChoiceAssembler], paces: Sequence[TokenPace], pass_on: Emit
) -> None:
    """Until each of the choices has ended."""
    going_on = len(own)
    while going_on:
        batch = await stream.next()
        choice = own[batch.choice]
        paces[batch.choice].note(len(batch.tokens))
        delta = choice.take(batch)
        if choice.stopped and batch.finish is None:
            if going_on == 1:
                await stream.hang_up(Hangup.STOP_STRING)
            else:
                stream.end_choice(batch.choice)
        await pass_on(choice, delta)
        if delta.finish is not None:
            choice.finish = delta.finish
            going_on -= 1


def by_request(choices: Iterable[ChoiceAssembler]) -> list[list[ChoiceAssembler]]:
    """The choices of each request."""
    return [list(own) for _, own in groupby(choices, key=lambda choice: id(choice.request))]


def _in_turn(emit: Emit) -> Emit:
    """For several tasks."""
    turn = asyncio.Lock()

    async def emit_in_turn(choice: ChoiceAssembler, delta: Delta) -> None:
        async with turn:
            await emit(choice, delta)

    return emit_in_turn


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    first = several.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
