"""Replies to a generation request: one JSON object, or a stream of server-sent events.

An error before the first byte of the reply becomes an HTTP error status. After the first byte the status is
sent already. Then the last event reports the error, and the end mark of a complete stream is left out. The
first byte is sent with the first token, or as a keep-alive when nothing was sent for a while.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.api.backend import Backend
from baton.api.generation.answer_stream import Emit, Split, Usage, answer, by_request, whole_batch
from baton.api.generation.choice_assembler import ChoiceAssembler, Delta
from baton.api.generation.event_writer import EventWriter
from baton.api.generation.rendering import Collected, Rendering, best_of, render
from baton.api.generation.transcript import Transcript
from baton.api.http.disconnect import UntilDisconnect
from baton.api.http.http_exchange import HttpExchange
from baton.api.http.metrics import HttpMetrics
from baton.api.resuming.event_ids import EventIds
from baton.api.resuming.stream_position import StreamPosition


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

    async def answer(self, emit: Emit, split: Split = whole_batch) -> Usage:
        """Generate every choice to its end, and return the token usage. Token counts and finish reasons are
        recorded in the HTTP exchange, for its log line, and in the metrics, also after an error."""
        exchange = self.exchange
        recorded = emit if self.transcript is None else self.transcript.recording(emit)
        try:
            usage = await answer(
                self.backend, self.choices, self.metrics, exchange.received_s, recorded, split
            )
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

        async def collect(choice: ChoiceAssembler, delta: Delta, _: bool) -> None:
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

    def __init__(
        self, answering: PendingAnswer, ids: EventIds | None, position: StreamPosition | None
    ) -> None:
        """Set what to stream. `ids`: makes the ids of the events, or None if the client wants none.
        `position`: position in the answer behind which its events are sent; None for all events."""
        super().__init__()
        self._answering = answering
        self._ids = ids
        self._position = position

    async def __call__(self, scope: Scope, receive: Receive, _: Send) -> None:
        stream = self._answering.exchange.events
        if stream is None:
            raise RuntimeError("a stream begins with its request")
        with UntilDisconnect(scope, receive):
            writer = EventWriter(stream, self._answering.rendering, self._ids, self._position)
            await writer.close(await self._answering.answer(writer.write, writer.parts))


class CompleteStream(Response):
    """HTTP response to a client that continues a stream of which it already has every event. It is an empty
    stream, and nothing is computed."""

    media_type = "text/event-stream"
