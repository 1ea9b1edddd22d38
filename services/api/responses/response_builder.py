"""Builds a response item by item, with the events of each step.

An answer is a list of items: reasoning, messages and calls. Each begins, grows and ends, and every step is
an event. A reply that is not streamed is built in the same way, and its events are dropped.

Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from baton.api.responses.response_ids import ResponseIds
from baton.api.responses.signed_reasoning import ReasoningSigner

Event = dict[str, Any]

COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"
IN_PROGRESS: Final = "in_progress"


class ResponseBuilder:
    """Builder of one response."""

    def __init__(
        self,
        names: ResponseIds,
        functions: Mapping[str, tuple[str, str | None]],
        carrier: ReasoningSigner | None,
        *,
        summarised: bool,
    ) -> None:
        """`functions`: name and namespace of each function, by the name that the model knows. `carrier`:
        signs reasoning, if the request asks for it. `summarised`: show reasoning in the place of
        summaries."""
        self._names = names
        self._functions = functions
        self._carrier = carrier
        self._summarised = summarised
        self.items: list[dict[str, Any]] = []
        self._open: _Growing | None = None

    @property
    def has_open_message(self) -> bool:
        """Whether a message is open."""
        return isinstance(self._open, _Message)

    def add_text(self, text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        events: list[Event] = []
        now = self._open
        if not isinstance(now, _Message):
            events += self.close()
            text = text.lstrip() if self.items else text  # of a message behind another item
            now = self._open = _Message(self._next("msg"), len(self.items))
            events += self._begun(now)
        return events + now.grow(text, logprobs)

    def add_reasoning(self, text: str) -> list[Event]:
        events: list[Event] = []
        now = self._open
        if not isinstance(now, _Reasoning):
            events += self.close()
            place = len(self.items)
            now = _Reasoning(self._next("rs"), place, self._carrier, summarised=self._summarised)
            self._open = now
            events += self._begun(now)
        return events + now.grow(text)

    def begin_call(self, id_: str, name: str) -> list[Event]:
        """Begin a call. `name`: as the model knows it."""
        own, namespace = self._functions.get(name, (name, None))
        events = self.close()
        now = self._open = _Call(self._next("fc"), len(self.items), id_, own, namespace)
        return [*events, *self._begun(now)]

    def add_arguments(self, arguments: str) -> list[Event]:
        """Add to the arguments of the open call."""
        return self._open.grow(arguments) if isinstance(self._open, _Call) else []

    def close(self, status: str = COMPLETED) -> list[Event]:
        """End the open item with this status."""
        now, self._open = self._open, None
        if now is None:
            return []
        item = now.item(status)
        self.items.append(item)
        return [*now.done(), {"type": "response.output_item.done", "output_index": now.place, "item": item}]

    def _next(self, kind: str) -> str:
        return self._names.of_item(kind, len(self.items))

    def _begun(self, now: "_Growing") -> list[Event]:
        item = now.item(IN_PROGRESS)
        return [
            {"type": "response.output_item.added", "output_index": now.place, "item": item},
            *now.begun(),
        ]


class _Growing(Protocol):
    """An item that is not finished."""

    place: int
    """Index of the item."""

    def item(self, status: str) -> dict[str, Any]: ...

    def begun(self) -> list[Event]: ...

    def done(self) -> list[Event]: ...


class _Message:
    """A message that is being written."""

    def __init__(self, id_: str, place: int) -> None:
        self.place = place
        self._id = id_
        self._where = {"item_id": id_, "output_index": place, "content_index": 0}
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def item(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [self._part()] if status != IN_PROGRESS else [],
        }

    def begun(self) -> list[Event]:
        return [{"type": "response.content_part.added", **self._where, "part": self._part()}]

    def grow(self, text: str, logprobs: Sequence[Any]) -> list[Event]:
        self._texts.append(text)
        self._logprobs += logprobs
        if not text and not logprobs:
            return []
        told = {**self._where, "delta": text, "logprobs": [*logprobs]}
        return [{"type": "response.output_text.delta", **told}]

    def done(self) -> list[Event]:
        told = {**self._where, "text": "".join(self._texts), "logprobs": [*self._logprobs]}
        return [
            {"type": "response.output_text.done", **told},
            {"type": "response.content_part.done", **self._where, "part": self._part()},
        ]

    def _part(self) -> dict[str, Any]:
        text = "".join(self._texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*self._logprobs]}


class _Reasoning:
    """Reasoning that is being written."""

    def __init__(self, id_: str, place: int, carrier: ReasoningSigner | None, *, summarised: bool) -> None:
        self.place = place
        self._id = id_
        self._carrier = carrier
        self._summarised = summarised
        index = "summary_index" if summarised else "content_index"
        self._where = {"item_id": id_, "output_index": place, index: 0}
        self._texts: list[str] = []

    def item(self, status: str) -> dict[str, Any]:
        shown = [self._part()] if status != IN_PROGRESS else []
        item: dict[str, Any] = {"id": self._id, "type": "reasoning", "status": status}
        item |= {"summary": [], "content": [], "encrypted_content": None}
        item["summary" if self._summarised else "content"] = shown
        if self._carrier is not None and status != IN_PROGRESS:
            item["encrypted_content"] = self._carrier.wrap(self._text)
        return item

    def begun(self) -> list[Event]:
        kind = "reasoning_summary_part" if self._summarised else "content_part"
        return [{"type": f"response.{kind}.added", **self._where, "part": self._part()}]

    def grow(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [{"type": f"response.{self._kind}.delta", **self._where, "delta": text}]

    def done(self) -> list[Event]:
        kind = "reasoning_summary_part" if self._summarised else "content_part"
        return [
            {"type": f"response.{self._kind}.done", **self._where, "text": self._text},
            {"type": f"response.{kind}.done", **self._where, "part": self._part()},
        ]

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    @property
    def _kind(self) -> str:
        return "reasoning_summary_text" if self._summarised else "reasoning_text"

    def _part(self) -> dict[str, Any]:
        kind = "summary_text" if self._summarised else "reasoning_text"
        return {"type": kind, "text": self._text}


class _Call:
    """A call that is being written."""

    def __init__(self, id_: str, place: int, call_id: str, name: str, namespace: str | None) -> None:
        self.place = place
        self._id = id_
        self._called = {"call_id": call_id, "name": name}
        if namespace is not None:
            self._called["namespace"] = namespace
        self._where = {"item_id": id_, "output_index": place}
        self._arguments: list[str] = []

    def item(self, status: str) -> dict[str, Any]:
        told = {**self._called, "arguments": "".join(self._arguments)}
        return {"id": self._id, "type": "function_call", "status": status, **told}

    def begun(self) -> list[Event]:
        return []

    def grow(self, arguments: str) -> list[Event]:
        self._arguments.append(arguments)
        return [{"type": "response.function_call_arguments.delta", **self._where, "delta": arguments}]

    def done(self) -> list[Event]:
        told = {"name": self._called["name"], "arguments": "".join(self._arguments)}
        return [{"type": "response.function_call_arguments.done", **self._where, **told}]
