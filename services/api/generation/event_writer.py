"""Writer of a streamed answer: renders what each token adds, gives each event an id, and sends the events.

Each token's events are rendered by themselves. So a router that computes the answer again makes the same
events, and leaves out those that the client already has (`stream-is-prefix`). Only plain text that comes
together shares an event, whose id is the position after all of its tokens. A router that continues behind
that id leaves out the same text, token by token.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.api.generation.answer_stream import Usage
from baton.api.generation.choice_assembler import ChoiceAssembler, Delta
from baton.api.generation.rendering import Rendering, TextKind, render
from baton.api.http.event_stream import EventStream, TextEvent
from baton.api.resuming.event_ids import EventIds
from baton.api.resuming.last_event_id import differing_answer
from baton.api.resuming.stream_position import Replay, StreamPosition
from baton.api.tools.parsing.output_parts import ContentDelta
from baton.rooms.request import TokenBatch


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
        self._templates: dict[int, tuple[TextKind, TextEvent]] = {}
        """Kind and template of the present events of each choice that differ only in the text."""
        self._text = ""
        """Text that shares the event of the next token's text, if both have the template `_text_event`."""
        self._text_event: TextEvent | None = None
        self._waiting: list[bytes] = []
        """Events that are sent with the next ones."""

    def parts(self, choice: ChoiceAssembler, batch: TokenBatch) -> Iterator[TokenBatch]:
        """Yield a batch of several tokens in parts, each after the events of the one before were written. A
        part is one token, or several that are content alone and do not end the choice."""
        tokens, finish, index, scores = batch
        start, last = 0, len(tokens) - 1
        while start < last:
            is_text = self._replay is None and choice.is_plain and self._template(choice, ContentDelta)
            stop = start + 1 if not is_text else last if finish is not None else len(tokens)
            yield TokenBatch(tokens[start:stop], None, index, () if start else scores)
            start = stop
        if start == last:
            yield TokenBatch(tokens[last:], finish, index)

    async def write(self, choice: ChoiceAssembler, delta: Delta, more: bool) -> None:
        """Send the events of a delta. `more`: whether the choice's next delta is there already, so that its
        events are sent with these. Raises ApiError if the answer differs from what the client has."""
        index, ids, sent = choice.index, self._ids, 0
        text = None if delta.finish is not None else delta.only_text
        event = None if text is None else self._template(choice, type(text))
        if self._text and event is not self._text_event:
            self._waiting.append(self._taken_text())
        if ids is not None:
            tokens = ids.position.add(index, delta.tokens)
            if self._replay is not None:
                sent = self._events_sent(self._replay, index, tokens, ended=delta.finish is not None)
        if text is None or event is None:
            self._templates.pop(index, None)
            chunks: list[Mapping[str, Any]] = []
            if index not in self._opened:
                self._opened.add(index)
                chunks += self._rendering.opening(choice)
            chunks += await render(lambda: self._rendering.chunks(choice, delta), delta.entries)
            self._add(index, chunks, sent)
        elif not sent:
            self._text += text.text
            self._text_event = event
        if more:
            return
        if self._text:
            self._waiting.append(self._taken_text())
        if self._waiting:
            await self._stream.write(self._taken())

    async def close(self, usage: Usage) -> None:
        """Send the events behind the last token, and end the stream."""
        chunks = self._rendering.closing(usage)
        events = [*map(self._framing.event, chunks), *([self._framing.end] if self._framing.end else ())]
        for number, event in enumerate(events, 1):
            if number > self._closing_sent:
                is_last = number == len(events)
                self._waiting.append(self._line(number, is_last=is_last) + event)
        await self._stream.write(self._taken(), last=True)

    def _template(self, choice: ChoiceAssembler, kind: TextKind) -> TextEvent | None:
        """Return the template of the choice's next event if it is text of one kind. None: it has none."""
        known = self._templates.get(choice.index)
        if known is not None and known[0] is kind:
            return known[1]
        if choice.index not in self._opened or not self._rendering.has_template(kind):
            return None
        event = TextEvent(
            self._framing, lambda text: self._rendering.chunks(choice, Delta(text, parts=[kind(text)]))
        )
        self._templates[choice.index] = kind, event
        return event

    def _taken_text(self) -> bytes:
        """Take the text that waits, and return its event. Its id is the position after the tokens so far."""
        assert self._text_event is not None
        event, self._text = self._text_event.of(self._text), ""
        return event if self._ids is None else self._ids.line(self._ids.position.text()) + event

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

    def _taken(self) -> bytes:
        """Take the events that wait."""
        waiting, self._waiting = self._waiting, []
        return b"".join(waiting)
