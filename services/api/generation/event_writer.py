"""Writer of a streamed answer: renders what each token adds, gives each event an id, and sends the events.

The events of a stream depend on its tokens alone, and not on how they came: each token's events are rendered
by themselves. So a router that computes the answer again makes the same events. It leaves out those that the
client already has (`stream-is-prefix`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from baton.api.generation.answer_stream import Usage
from baton.api.generation.choice_assembler import ChoiceAssembler, Delta
from baton.api.generation.rendering import Rendering, render
from baton.api.http.event_stream import EventStream, TextEvent
from baton.api.resuming.event_ids import EventIds
from baton.api.resuming.last_event_id import differing_answer
from baton.api.resuming.stream_position import Replay, StreamPosition


class EventWriter:
    """Writer of one answer's events."""

    def __init__(
        self,
        stream: EventStream,
        rendering: Rendering,
        ids: EventIds | None,
        position: StreamPosition | None,
    ) -> None:
        """Start to write. `ids`: makes the ids of the events, or None if the client wants none. `position`:
        position in the answer behind which the events are sent; None for all events."""
        self._stream = stream
        self._rendering = rendering
        self._framing = rendering.framing
        self._ids = ids
        self._replay = None if position is None else Replay(position)
        self._closing_sent = 0 if position is None else position.closing
        self._opened: set[int] = set()
        self._texts: dict[int, TextEvent] = {}
        self._waiting: list[bytes] = []
        """Events that are sent with the next ones."""

    async def write(self, choice: ChoiceAssembler, delta: Delta, more: bool) -> None:
        """Send the events of one token. `more`: whether the next token is there already, so that its events
        are sent with these. Raises ApiError if the answer differs from what the client has."""
        index, rendering, ids, sent = choice.index, self._rendering, self._ids, 0
        if ids is not None:
            tokens = ids.position.add(index, delta.tokens)
            if self._replay is not None:
                sent = self._events_sent(self._replay, index, tokens, ended=delta.finish is not None)
        plain = delta.finish is None and rendering.text_alone and index in self._opened
        if plain and (text := delta.only_content) is not None:
            if text and not sent:
                if (event := self._texts.get(index)) is None:
                    event = self._texts[index] = TextEvent(
                        self._framing, lambda text: rendering.chunks(choice, Delta(text=text))
                    )
                line = b"" if ids is None else ids.line(ids.position.text())
                if not (more or self._waiting):
                    await self._stream.write(line + event.of(text))
                    return
                self._waiting.append(line + event.of(text))
        else:
            self._texts.pop(index, None)
            chunks: list[Mapping[str, Any]] = []
            if index not in self._opened:
                self._opened.add(index)
                chunks += rendering.opening(choice)
            chunks += await render(lambda: rendering.chunks(choice, delta), delta.entries)
            self._add(index, chunks, sent)
        if self._waiting and not more:
            await self._send()

    async def close(self, usage: Usage) -> None:
        """Send the events behind the last token, and end the stream."""
        chunks = self._rendering.closing(usage)
        events = [*map(self._framing.event, chunks), *([self._framing.end] if self._framing.end else ())]
        for number, event in enumerate(events, 1):
            if number > self._closing_sent:
                is_last = number == len(events)
                self._waiting.append(self._line(number, is_last=is_last) + event)
        await self._send(last=True)

    def _events_sent(self, replay: Replay, index: int, tokens: int, *, ended: bool) -> int:
        """Return how many events of a token the client of a resumed stream already has. `tokens`: number of
        the choice's tokens so far. `ended`: whether it has ended. Raises ApiError if the answer differs."""
        assert self._ids is not None
        sent = replay.events_sent(index, tokens)
        if replay.differs(index, tokens, self._ids.position.check(index), ended=ended):
            raise differing_answer()
        if replay.is_over:
            self._replay = None
        return sent

    def _add(self, index: int, chunks: Sequence[Mapping[str, Any]], sent: int) -> None:
        """Add the events of a token, without the first `sent` of them."""
        ids, last = self._ids, len(chunks)
        for number, chunk in enumerate(chunks, 1):
            if number <= sent:
                continue
            line = b""
            if ids is not None:
                position = ids.position
                line = ids.line(position.text() if number == last else position.within(index, number))
            self._waiting.append(line + self._framing.event(chunk))

    def _line(self, number: int, *, is_last: bool) -> bytes:
        """Return the line with the id of event number `number` behind the last token."""
        ids = self._ids
        return b"" if ids is None else ids.line(ids.position.closing(number, last=is_last))

    async def _send(self, *, last: bool = False) -> None:
        waiting, self._waiting = self._waiting, []
        await self._stream.write(b"".join(waiting), last=last)
