"""Chat messages for the items of a conversation in the Responses API.

Consecutive reasoning, text and tool calls, in this order, become one message of the assistant, which chat
templates can show. In another order, or after another role's item, a new message begins.

No I/O, clock or threads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, assert_never

from baton.api.errors import ApiError, invalid
from baton.api.requests.field_paths import FieldPaths
from baton.api.requests.tool_names import namespaced_name
from baton.api.responses.input_items import CallItem, CompleteItem, MessageItem, ReasoningItem, ResultItem
from baton.api.responses.signed_reasoning import NotOurs, ReasoningSigner

ABOVE: Final = ("system", "developer")
BETWEEN: Final = "\n\n"
"""Text that separates the instructions from the system or developer messages after them, which become one
message with them."""


class Placed(NamedTuple):
    """An item of a conversation in the Responses API, with its path in the request body."""

    item: CompleteItem
    path: str
    content: str = ""
    """Path of the message's content in the request body. Empty if the item is written as an object, so that
    the content is its field `content`."""


@dataclass(slots=True)
class _AssistantTurn:
    """A message of the assistant that is being built from consecutive items: reasoning, texts, tool calls."""

    place: int
    """Index of the assistant's message in the list of chat messages."""
    reasoning: list[str] = field(default_factory=list)
    said: list[str] | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.said is not None:
            message["content"] = "".join(self.said)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class MessageBuilder:
    """Builder of the chat messages of one conversation."""

    def __init__(self, carrier: ReasoningSigner, terms: FieldPaths) -> None:
        """Start a conversation without messages.

        `carrier`: verifies signed reasoning that the client sends back. `terms`: map of field paths, to which
        the path of each message's source in the request body is added.
        """
        self._carrier = carrier
        self._paths = terms.paths
        self._messages: list[dict[str, Any]] = []
        self._open: _AssistantTurn | None = None

    def of(self, instructions: str | None, items: Sequence[Placed]) -> list[dict[str, Any]]:
        """Return the chat messages for the request's `instructions` and the items of its conversation. Raises
        ApiError.

        If there are instructions, the system's and developer's texts at the beginning are joined to them in
        one message. Many chat templates accept only one system message.
        """
        rest: Iterable[Placed] = items
        if instructions is not None:
            texts, above = [instructions], 0
            for item, *_ in items:
                if not (isinstance(item, MessageItem) and item.role in ABOVE):
                    break
                texts.append(joined(item.content))
                above += 1
            self._add_message("system", BETWEEN.join(texts), "instructions", "instructions")
            rest = items[above:]
        for placed in rest:
            self._take(placed)
        self._close()
        return self._messages

    def _take(self, placed: Placed) -> None:
        item, path, content = placed
        match item:
            case MessageItem(role="assistant"):
                self._add_text(joined(item.content), path)
            case MessageItem():
                self._add_message(item.role, item.content, path, content or f"{path}.content")
            case ReasoningItem():
                self._add_reasoning(item, path)
            case CallItem():
                self._add_call(item, path)
            case ResultItem():
                self._close()
                here = f"messages[{len(self._messages)}]"
                self._paths[here] = path
                self._paths[f"{here}.content"] = f"{path}.output"
                self._paths[f"{here}.tool_call_id"] = f"{path}.call_id"
                told = {"role": "tool", "content": _parts(item.output), "tool_call_id": item.call_id}
                self._messages.append(told)
            case _:
                assert_never(item)

    def _add_message(self, role: str, content: str | list[str], path: str, texts: str) -> None:
        self._close()
        here = f"messages[{len(self._messages)}]"
        self._paths[here], self._paths[f"{here}.content"] = path, texts
        self._messages.append({"role": role, "content": _parts(content)})

    def _add_text(self, text: str, path: str) -> None:
        turn = self._turn(path)
        if turn.calls:
            turn = self._next(path)
        if turn.said is None:
            turn.said = []
            self._paths[f"messages[{turn.place}].content"] = f"{path}.content"
        turn.said.append(text)

    def _add_reasoning(self, item: ReasoningItem, path: str) -> None:
        reasoning = self._reasoning_of(item, path)
        if not reasoning:
            return
        turn = self._turn(path)
        if turn.said is not None or turn.calls:
            turn = self._next(path)
        self._paths.setdefault(f"messages[{turn.place}].reasoning_content", path)
        turn.reasoning.append(reasoning)

    def _reasoning_of(self, item: ReasoningItem, path: str) -> str:
        """Return an item's reasoning: the signed one, else the text, else the summary. Raises ApiError."""
        if item.encrypted_content is not None:
            try:
                return self._carrier.unwrap(item.encrypted_content)
            except NotOurs:
                raise _not_ours(f"{path}.encrypted_content") from None
        return "".join(each.text for each in item.content or item.summary)

    def _add_call(self, item: CallItem, path: str) -> None:
        turn = self._turn(path)
        self._paths[f"messages[{turn.place}].tool_calls[{len(turn.calls)}]"] = path
        self._paths[f"messages[{turn.place}].tool_calls[{len(turn.calls)}].id"] = f"{path}.call_id"
        self._paths[f"messages[{turn.place}].tool_calls[{len(turn.calls)}].function"] = path
        function = {"name": namespaced_name(item.name, item.namespace), "arguments": item.arguments}
        turn.calls.append({"id": item.call_id, "type": "function", "function": function})

    def _turn(self, path: str) -> _AssistantTurn:
        if self._open is None:
            self._open = _AssistantTurn(len(self._messages))
            self._paths[f"messages[{self._open.place}]"] = path
        return self._open

    def _next(self, path: str) -> _AssistantTurn:
        self._close()
        return self._turn(path)

    def _close(self) -> None:
        if self._open is not None:
            self._messages.append(self._open.message)
            self._open = None


def joined(texts: str | Sequence[str]) -> str:
    return texts if isinstance(texts, str) else "".join(texts)


def _parts(content: str | list[str]) -> str | list[dict[str, str]]:
    """Return the content of a conversation item as a chat message's content: a text or a list of
    text parts."""
    return content if isinstance(content, str) else [{"type": "text", "text": each} for each in content]


def _not_ours(param: str) -> ApiError:
    why = f"'{param}' was not signed by this server, or was changed since; leave the item out."
    return invalid(param, why)
