"""How does an answer reach the client: at once as it grows, or whole, or as an error?

Before the first byte every failure is an exception and becomes an error status. After it, the status is
spent: the failure is the last event, and the stream does not end as whole ones do. The first byte leaves with
the first token, or once nothing was sent for a while.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.api.backend import Backend
from baton.api.generation.answer_stream import Emit, Usage, answer, by_request
from baton.api.generation.best_of import best_of
from baton.api.generation.choice_assembler import ChoiceAssembler, Delta
from baton.api.generation.rendering import Collected, Rendering
from baton.api.generation.transcript import Transcript
from baton.api.http.disconnect import unless_gone
from baton.api.http.event_stream import EventStream, TextEvent
from baton.api.http.http_exchange import HttpExchange
from baton.api.http.metrics import HttpMetrics

T = TypeVar("T")

AT_ONCE: Final = 4096
"""Log-probabilities that are shown in the event loop: some milliseconds."""


@dataclass(frozen=True, slots=True)
class PendingAnswer:
    """An admitted request on its way to being answered."""

    backend: Backend
    choices: Sequence[ChoiceAssembler]
    rendering: Rendering
    metrics: HttpMetrics
    exchange: HttpExchange
    transcript: Transcript | None = None
    given: int | None = None
    """Of each request's choices the best so many are; None: all."""

    async def answer(self, emit: Emit) -> Usage:
        """Run every choice to its end, and note in the exchange and the metrics what came of it."""
        exchange = self.exchange
        heard = emit if self.transcript is None else self.transcript.hearing(emit)
        try:
            usage = await answer(self.backend, self.choices, self.metrics, exchange.received_s, heard)
            exchange.cached_tokens = usage.cached_tokens
            return usage
        finally:
            asked = by_request(self.choices)
            exchange.choices = len(self.choices)
            exchange.prompt_tokens = sum(len(own[0].request.prompt) for own in asked)
            exchange.output_tokens = sum(choice.output_tokens for choice in self.choices)
            exchange.finish_reasons = tuple(
                choice.reason(choice.finish) for choice in self.choices if choice.finish is not None
            )
            finished = len(exchange.finish_reasons)
            given = None if self.given is None else self.given * len(asked)
            self.metrics.count_choices(finished, len(self.choices) - finished, given)
            self.metrics.count_calls(
                sum(choice.calls for choice in self.choices),
                sum(choice.unread_calls for choice in self.choices),
            )
            if self.transcript is not None:
                self.transcript.write()


async def made(work: Callable[[], T], entries: int) -> T:
    """What `work` makes of so many log-probabilities: in a thread where they are many, for which everybody
    else would wait."""
    if entries <= AT_ONCE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)


class WholeReply(Response):
    """One JSON object, once everything is there."""

    def __init__(self, answering: PendingAnswer) -> None:
        super().__init__()
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await unless_gone(scope, receive, self._body())
        await Response(to_json(body), media_type="application/json")(scope, receive, send)

    async def _body(self) -> dict[str, Any]:
        asked = self._answering
        parts = {choice.index: Collected(choice) for choice in asked.choices}

        async def collect(choice: ChoiceAssembler, delta: Delta) -> None:
            shown = await made(lambda: asked.rendering.logprobs(delta), delta.entries)
            parts[choice.index].add(delta, shown)

        usage = await asked.answer(collect)
        told = sum(choice.beginning.entries for choice in asked.choices if choice.beginning is not None)
        if asked.given is None:
            collected = [parts[choice.index] for choice in asked.choices]
            return await made(lambda: asked.rendering.whole(collected, usage), told)
        best = [
            part
            for own in by_request(asked.choices)
            for part in best_of([parts[choice.index] for choice in own], asked.given)
        ]
        for index, part in enumerate(best):
            part.choice.index = index
        return await made(lambda: asked.rendering.whole(best, usage), told)


class StreamedReply(Response):
    """Server-sent events. What goes wrong is raised, and becomes a status or the last event (`edge.py`)."""

    def __init__(self, answering: PendingAnswer) -> None:
        super().__init__()
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, _: Send) -> None:
        stream = self._answering.exchange.events
        if stream is None:
            raise RuntimeError("a stream begins with its request")
        await unless_gone(scope, receive, self._write(stream))

    async def _write(self, stream: EventStream) -> None:
        asked = self._answering
        rendering, events = asked.rendering, asked.rendering.framing.events
        opened: set[int] = set()
        texts: dict[int, TextEvent] = {}

        async def emit(choice: ChoiceAssembler, delta: Delta) -> None:
            plain = delta.finish is None and rendering.text_alone and choice.index in opened
            if plain and (text := delta.said_alone) is not None:
                if text:
                    if (event := texts.get(choice.index)) is None:
                        event = texts[choice.index] = TextEvent(
                            rendering.framing, lambda text: rendering.chunks(choice, Delta(text=text))
                        )
                    await stream.write(event.of(text))
                return
            texts.pop(choice.index, None)
            chunks = []
            if choice.index not in opened:
                opened.add(choice.index)
                chunks += rendering.opening(choice)
            chunks += await made(lambda: rendering.chunks(choice, delta), delta.entries)
            if chunks:
                await stream.write(events(chunks))

        usage = await asked.answer(emit)
        await stream.write(events(rendering.closing(usage)) + rendering.framing.end, last=True)
