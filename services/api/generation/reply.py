"""Replies to a generation request: one JSON object, or a stream of server-sent events.

An error before the first byte of the reply becomes an HTTP error status. After the first byte the status is
sent already. Then the last event reports the error, and the end mark of a complete stream is left out. The
first byte is sent with the first token, or as a keep-alive when nothing was sent for a while.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.api.backend import Backend
from baton.api.generation.answer_stream import Emit, Usage, answer, by_request
from baton.api.generation.choice_assembler import ChoiceAssembler, Delta
from baton.api.generation.rendering import Collected, Rendering, best_of
from baton.api.generation.transcript import Transcript
from baton.api.http.disconnect import UntilDisconnect
from baton.api.http.event_stream import EventStream, TextEvent
from baton.api.http.http_exchange import HttpExchange
from baton.api.http.metrics import HttpMetrics

T = TypeVar("T")

INLINE_LOGPROBS_MAX: Final = 4096
"""Most log-probabilities that are rendered at once in the event loop. That takes some milliseconds. More are
rendered in a thread."""


@dataclass(frozen=True, slots=True)
class PendingAnswer:
    """A request that passed all checks, with the worker requests, choices and rendering that generate its
    answer."""

    backend: Backend
    choices: Sequence[ChoiceAssembler]
    rendering: Rendering
    metrics: HttpMetrics
    exchange: HttpExchange
    transcript: Transcript | None = None
    best: int | None = None
    """Number of choices that are returned for each prompt, the best ones. None: all choices are returned."""

    async def answer(self, emit: Emit) -> Usage:
        """Generate every choice to its end, and return the token usage. Token counts and finish reasons are
        recorded in the HTTP exchange, for its log line, and in the metrics, also after an error."""
        exchange = self.exchange
        recorded = emit if self.transcript is None else self.transcript.recording(emit)
        try:
            usage = await answer(self.backend, self.choices, self.metrics, exchange.received_s, recorded)
            exchange.cached_tokens = usage.cached_tokens
            return usage
        finally:
            requests = by_request(self.choices)
            exchange.choices = len(self.choices)
            exchange.prompt_tokens = sum(len(own[0].request.prompt) for own in requests)
            exchange.output_tokens = sum(choice.output_tokens for choice in self.choices)
            exchange.finish_reasons = tuple(
                choice.reason(choice.finish) for choice in self.choices if choice.finish is not None
            )
            finished = len(exchange.finish_reasons)
            returned = None if self.best is None else self.best * len(requests)
            self.metrics.count_choices(finished, len(self.choices) - finished, returned)
            self.metrics.count_calls(
                sum(choice.calls for choice in self.choices),
                sum(choice.malformed_calls for choice in self.choices),
            )
            if self.transcript is not None:
                self.transcript.write()


async def render(work: Callable[[], T], entries: int) -> T:
    """Return the result of `work`, which renders a part of a response. `entries`: number of log-probabilities
    that it renders. More than INLINE_LOGPROBS_MAX are rendered in a thread, so that other requests do not
    wait."""
    if entries <= INLINE_LOGPROBS_MAX:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)


class WholeReply(Response):
    """HTTP response with the whole answer as one JSON object, sent when the answer is complete."""

    def __init__(self, answering: PendingAnswer) -> None:
        super().__init__()
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with UntilDisconnect(scope, receive):
            body = await self._body()
        await Response(to_json(body), media_type="application/json")(scope, receive, send)

    async def _body(self) -> Mapping[str, Any]:
        answering = self._answering
        rendering = answering.rendering
        parts = {choice.index: Collected(choice) for choice in answering.choices}

        async def collect(choice: ChoiceAssembler, delta: Delta) -> None:
            logprobs = None
            if rendering.shows_logprobs:
                logprobs = await render(lambda: rendering.logprobs(delta), delta.entries)
            parts[choice.index].deltas.append(delta)
            parts[choice.index].shown_logprobs.append(logprobs)

        usage = await answering.answer(collect)
        entries = sum(choice.echo.entries for choice in answering.choices if choice.echo is not None)
        if answering.best is None:
            collected = [parts[choice.index] for choice in answering.choices]
            return await render(lambda: rendering.whole(collected, usage), entries)
        best = [
            part
            for own in by_request(answering.choices)
            for part in best_of([parts[choice.index] for choice in own], answering.best)
        ]
        for index, part in enumerate(best):
            part.choice.index = index
        return await render(lambda: rendering.whole(best, usage), entries)


class StreamedReply(Response):
    """HTTP response that streams the answer as server-sent events. Its errors become an HTTP status or the
    stream's last event, in `middleware.py`."""

    def __init__(self, answering: PendingAnswer) -> None:
        super().__init__()
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, _: Send) -> None:
        stream = self._answering.exchange.events
        if stream is None:
            raise RuntimeError("a stream begins with its request")
        with UntilDisconnect(scope, receive):
            await self._write(stream)

    async def _write(self, stream: EventStream) -> None:
        rendering = self._answering.rendering
        events = rendering.framing.events
        opened: set[int] = set()
        texts: dict[int, TextEvent] = {}

        async def emit(choice: ChoiceAssembler, delta: Delta) -> None:
            plain = delta.finish is None and rendering.text_alone and choice.index in opened
            if plain and (text := delta.only_content) is not None:
                if text:
                    if (event := texts.get(choice.index)) is None:
                        event = texts[choice.index] = TextEvent(
                            rendering.framing, lambda text: rendering.chunks(choice, Delta(text=text))
                        )
                    await stream.write(event.of(text))
                return
            texts.pop(choice.index, None)
            chunks: list[Mapping[str, Any]] = []
            if choice.index not in opened:
                opened.add(choice.index)
                chunks += rendering.opening(choice)
            chunks += await render(lambda: rendering.chunks(choice, delta), delta.entries)
            if chunks:
                await stream.write(events(chunks))

        usage = await self._answering.answer(emit)
        await stream.write(events(rendering.closing(usage)) + rendering.framing.end, last=True)
