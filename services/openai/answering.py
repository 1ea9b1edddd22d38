"""How do a request's tokens get from the backend to whoever renders them, whatever goes wrong?

A stream that was opened is always ended: by its last batch, or by one `hang_up` when a stop string is
complete, the client is gone, the task is cancelled, or a sibling prompt failed. A request of several
prompts succeeds or fails as a whole.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from services.openai.backend import Backend, Hangup, TokenStream
from services.openai.choice import Choice, Delta
from services.openai.hangup import ClientGone
from services.openai.metrics import HttpMetrics

Emit = Callable[[Choice, Delta], Awaitable[None]]


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = field(default=0)
    reasoning_tokens: int | None = None
    """None: thoughts are not told from answers."""

    def add(self, choice: Choice, cached_tokens: int) -> None:
        """One that has ended."""
        self.completion_tokens += choice.output_tokens
        self.cached_tokens += cached_tokens
        if choice.tells_thoughts:
            self.reasoning_tokens = (self.reasoning_tokens or 0) + choice.reasoning_tokens

    def rendered(self) -> dict[str, object]:
        counts = counted(self.prompt_tokens, self.completion_tokens)
        counts["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        if self.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return counts


def counted(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


async def answer(
    backend: Backend, choices: Sequence[Choice], metrics: HttpMetrics, received_s: float, emit: Emit
) -> Usage:
    """Run every choice to its end and `emit` each delta, in order within a choice.

    `received_s` is when the HTTP request came in, by `time.perf_counter`. `emit` is called by one task at a
    time. Raises BackendError, or what `emit` raises; by then every stream is ended.
    """
    pass_on = emit if len(choices) == 1 else _in_turn(emit)
    usage = Usage(prompt_tokens=sum(len(choice.request.prompt) for choice in choices))
    why = Hangup.CLIENT_GONE
    """What a cancelled choice is cancelled for, until a choice failed by itself: the others go with it."""

    async def run(choice: Choice) -> None:
        nonlocal why
        stream: TokenStream | None = None
        try:
            stream = await backend.generate(choice.request, lambda: why)
            await _read(stream, choice)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError | ClientGone):
                why = Hangup.REQUEST_FAILED
            if stream is not None:
                await asyncio.shield(stream.hang_up(why))
            raise
        usage.add(choice, stream.cached_tokens)

    async def _read(stream: TokenStream, choice: Choice) -> None:
        pace = metrics.pace(received_s)
        while True:
            batch = await stream.next()
            pace.note(len(batch.tokens))
            delta = choice.take(batch)
            if choice.stopped and batch.finish is None:
                await stream.hang_up(Hangup.STOP_STRING)
            await pass_on(choice, delta)
            if delta.finish is not None:
                choice.finish = delta.finish
                return

    if len(choices) == 1:
        await run(choices[0])
        return usage
    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(run(choice))
    except BaseExceptionGroup as several:
        raise _first(several) from None
    return usage


def _in_turn(emit: Emit) -> Emit:
    """For several tasks."""
    turn = asyncio.Lock()

    async def emit_in_turn(choice: Choice, delta: Delta) -> None:
        async with turn:
            await emit(choice, delta)

    return emit_in_turn


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    first = several.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
