"""Builder of a response of the Responses API, item by item, with the events of each step.

The output is a list of items: reasoning, messages and tool calls. Each item begins, grows and ends, and every
step is an event. A reply that is not streamed is built in the same way, and its events are dropped.

No I/O, clock or threads.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from baton.api.generation.logprob_objects import ChosenLogprob
from baton.api.responses.response_ids import ResponseIds
from baton.api.responses.response_objects import (
    CalledName,
    InItem,
    InMessage,
    InSummary,
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputReasoningText,
    OutputSummaryText,
    OutputText,
    ResponsesEvent,
)
from baton.api.responses.signed_reasoning import ReasoningSigner

COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"
IN_PROGRESS: Final = "in_progress"


class ResponseBuilder:
    """Builder of the output items of one response, and of the events that stream them to the client."""

    def __init__(
        self,
        names: ResponseIds,
        functions: Mapping[str, tuple[str, str | None]],
        carrier: ReasoningSigner | None,
        *,
        summarised: bool,
    ) -> None:
        """Start a response without items.

        `functions`: name and namespace of each function, by the name that the model knows. `carrier`: signs
        reasoning, or None if the request does not ask for that. `summarised`: whether reasoning is shown in
        the place of summaries.
        """
        self._names = names
        self._functions = functions
        self._carrier = carrier
        self._summarised = summarised
        self.items: list[OutputItem] = []
        self.pieces: list[ItemPieces] = []
        """Sizes of the pieces in which each item was streamed."""
        self._open: _Growing | None = None

    @property
    def has_open_message(self) -> bool:
        """Whether the item that is being written is a message."""
        return isinstance(self._open, _Message)

    def add_text(self, text: str, logprobs: Sequence[ChosenLogprob] = ()) -> list[ResponsesEvent]:
        events: list[ResponsesEvent] = []
        now = self._open
        if not isinstance(now, _Message):
            events += self.close()
            text = text.lstrip() if self.items else text  # whitespace between two items
            now = self._open = _Message(self._next("msg"), len(self.items))
            events += self._begun(now)
        return events + now.grow(text, logprobs)

    def add_reasoning(self, text: str) -> list[ResponsesEvent]:
        events: list[ResponsesEvent] = []
        now = self._open
        if not isinstance(now, _Reasoning):
            events += self.close()
            place = len(self.items)
            kind = _Summary if self._summarised else _Reasoning
            now = self._open = kind(self._next("rs"), place, self._carrier)
            events += self._begun(now)
        return events + now.grow(text)

    def begin_call(self, id_: str, name: str) -> list[ResponsesEvent]:
        """Begin the item of a tool call, and return the events.

        `name`: name of the function as the model knows it.
        """
        own, namespace = self._functions.get(name, (name, None))
        events = self.close()
        now = self._open = _Call(self._next("fc"), len(self.items), id_, own, namespace)
        return [*events, *self._begun(now)]

    def add_arguments(self, arguments: str) -> list[ResponsesEvent]:
        """Add text to the arguments of the tool call that is being written, and return the events that stream
        it."""
        return self._open.grow(arguments) if isinstance(self._open, _Call) else []

    def close(self, status: ItemStatus = COMPLETED) -> list[ResponsesEvent]:
        """End the output item that is being written, with the given status, and return the events that report
        it."""
        now, self._open = self._open, None
        if now is None:
            return []
        item = now.item(status)
        self.items.append(item)
        self.pieces.append(now.pieces)
        return [*now.done(), {"type": "response.output_item.done", "output_index": now.place, "item": item}]

    def _next(self, kind: str) -> str:
        return self._names.of_item(kind, len(self.items))

    def _begun(self, now: "_Growing") -> list[ResponsesEvent]:
        item = now.item(IN_PROGRESS)
        return [
            {"type": "response.output_item.added", "output_index": now.place, "item": item},
            *now.begun(),
        ]


class ItemPieces(NamedTuple):
    """Sizes of the pieces in which one output item was streamed, in order."""

    chars: list[int]
    """Number of characters of each piece."""
    logprobs: list[int]
    """Number of log-probabilities of each piece. Empty if no piece has any."""


def item_events(item: OutputItem, place: int, pieces: ItemPieces) -> list[ResponsesEvent]:
    """Return the events that stream a complete output item, as when it was written.

    `place`: index of the item in the output list. `pieces`: sizes of the pieces of its text.
    """
    now, text, logprobs = _growing(item, place)
    counts = pieces.logprobs or [0] * len(pieces.chars)
    added: ResponsesEvent = {
        "type": "response.output_item.added",
        "output_index": place,
        "item": now.item(IN_PROGRESS),
    }
    events = [added, *now.begun()]
    at = scored = 0
    for chars, count in zip(pieces.chars, counts, strict=True):
        events += now.grow(text[at : at + chars], logprobs[scored : scored + count])
        at, scored = at + chars, scored + count
    return [*events, *now.done(), {"type": "response.output_item.done", "output_index": place, "item": item}]


def _growing(item: OutputItem, place: int) -> "tuple[_Growing, str, Sequence[ChosenLogprob]]":
    """Return a new output item like a complete one, and the complete one's text and log-probabilities."""
    if item["type"] == "message":
        part = item["content"][0]
        return _Message(item["id"], place), part["text"], part["logprobs"]
    if item["type"] == "function_call":
        call = _Call(item["id"], place, item["call_id"], item["name"], item.get("namespace"))
        return call, item["arguments"], ()
    if item["summary"]:
        return _Summary(item["id"], place, None), item["summary"][0]["text"], ()
    return _Reasoning(item["id"], place, None), item["content"][0]["text"], ()


class _Growing(Protocol):
    """Interface of an output item that is being written."""

    place: int
    """Index of the item in the output list of the response."""
    pieces: ItemPieces

    def grow(self, text: str, logprobs: Sequence[ChosenLogprob] = ()) -> list[ResponsesEvent]: ...

    def item(self, status: ItemStatus) -> OutputItem: ...

    def begun(self) -> list[ResponsesEvent]: ...

    def done(self) -> list[ResponsesEvent]: ...


class _Message:
    """An output item with a message that is being written."""

    def __init__(self, id_: str, place: int) -> None:
        self.place = place
        self._id = id_
        self._where: InMessage = {"item_id": id_, "output_index": place, "content_index": 0}
        self._texts: list[str] = []
        self._logprobs: list[ChosenLogprob] = []
        self.pieces = ItemPieces([], [])

    def item(self, status: ItemStatus) -> OutputMessage:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [self._part()] if status != IN_PROGRESS else [],
        }

    def begun(self) -> list[ResponsesEvent]:
        return [{"type": "response.content_part.added", **self._where, "part": self._part()}]

    def grow(self, text: str, logprobs: Sequence[ChosenLogprob] = ()) -> list[ResponsesEvent]:
        self._texts.append(text)
        if logprobs or self._logprobs:
            self.pieces.logprobs.extend([0] * (len(self.pieces.chars) - len(self.pieces.logprobs)))
            self.pieces.logprobs.append(len(logprobs))
        self.pieces.chars.append(len(text))
        self._logprobs += logprobs
        if not text and not logprobs:
            return []
        return [{"type": "response.output_text.delta", **self._where, "delta": text, "logprobs": [*logprobs]}]

    def done(self) -> list[ResponsesEvent]:
        part = self._part()
        text, logprobs = part["text"], [*part["logprobs"]]
        return [
            {"type": "response.output_text.done", **self._where, "text": text, "logprobs": logprobs},
            {"type": "response.content_part.done", **self._where, "part": part},
        ]

    def _part(self) -> OutputText:
        text = "".join(self._texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*self._logprobs]}


class _Reasoning:
    """An output item that holds reasoning as `reasoning_text` content, while it is being written."""

    def __init__(self, id_: str, place: int, carrier: ReasoningSigner | None) -> None:
        self.place = place
        self._id = id_
        self._carrier = carrier
        self._where: InMessage = {"item_id": id_, "output_index": place, "content_index": 0}
        self._texts: list[str] = []
        self.pieces = ItemPieces([], [])

    def item(self, status: ItemStatus) -> OutputReasoning:
        item: OutputReasoning = {
            "id": self._id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [],
            "encrypted_content": None,
        }
        if status != IN_PROGRESS:
            self._show(item)
            if self._carrier is not None:
                item["encrypted_content"] = self._carrier.wrap(self._text)
        return item

    def begun(self) -> list[ResponsesEvent]:
        return [{"type": "response.content_part.added", **self._where, "part": self._part()}]

    def grow(self, text: str, _: Sequence[ChosenLogprob] = ()) -> list[ResponsesEvent]:
        self._texts.append(text)
        self.pieces.chars.append(len(text))
        return [{"type": "response.reasoning_text.delta", **self._where, "delta": text}]

    def done(self) -> list[ResponsesEvent]:
        return [
            {"type": "response.reasoning_text.done", **self._where, "text": self._text},
            {"type": "response.content_part.done", **self._where, "part": self._part()},
        ]

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _show(self, item: OutputReasoning) -> None:
        item["content"] = [self._part()]

    def _part(self) -> OutputReasoningText:
        return {"type": "reasoning_text", "text": self._text}


class _Summary(_Reasoning):
    """An output item with reasoning that is being written, shown in the place of a summary."""

    def __init__(self, id_: str, place: int, carrier: ReasoningSigner | None) -> None:
        super().__init__(id_, place, carrier)
        self._at: InSummary = {"item_id": id_, "output_index": place, "summary_index": 0}

    def begun(self) -> list[ResponsesEvent]:
        return [{"type": "response.reasoning_summary_part.added", **self._at, "part": self._summary()}]

    def grow(self, text: str, _: Sequence[ChosenLogprob] = ()) -> list[ResponsesEvent]:
        self._texts.append(text)
        self.pieces.chars.append(len(text))
        return [{"type": "response.reasoning_summary_text.delta", **self._at, "delta": text}]

    def done(self) -> list[ResponsesEvent]:
        return [
            {"type": "response.reasoning_summary_text.done", **self._at, "text": self._text},
            {"type": "response.reasoning_summary_part.done", **self._at, "part": self._summary()},
        ]

    def _show(self, item: OutputReasoning) -> None:
        item["summary"] = [self._summary()]

    def _summary(self) -> OutputSummaryText:
        return {"type": "summary_text", "text": self._text}


class _Call:
    """An output item with a tool call that is being written."""

    def __init__(self, id_: str, place: int, call_id: str, name: str, namespace: str | None) -> None:
        self.place = place
        self._id = id_
        self._called: CalledName = {"call_id": call_id, "name": name}
        if namespace is not None:
            self._called["namespace"] = namespace
        self._where: InItem = {"item_id": id_, "output_index": place}
        self._arguments: list[str] = []
        self.pieces = ItemPieces([], [])

    def item(self, status: ItemStatus) -> OutputCall:
        arguments = "".join(self._arguments)
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            **self._called,
            "arguments": arguments,
        }

    def begun(self) -> list[ResponsesEvent]:
        return []

    def grow(self, arguments: str, _: Sequence[ChosenLogprob] = ()) -> list[ResponsesEvent]:
        self._arguments.append(arguments)
        self.pieces.chars.append(len(arguments))
        return [{"type": "response.function_call_arguments.delta", **self._where, "delta": arguments}]

    def done(self) -> list[ResponsesEvent]:
        name, arguments = self._called["name"], "".join(self._arguments)
        return [
            {
                "type": "response.function_call_arguments.done",
                **self._where,
                "name": name,
                "arguments": arguments,
            }
        ]
