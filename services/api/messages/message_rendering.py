"""Rendering of answers of Anthropic's Messages API, as a whole or as a stream of events.

An answer is a message of content blocks: reasoning, texts and tool calls, in the order in which they were
generated. A stream opens a block, adds to it, and closes it before the next one. Cached tokens of a prompt
are counted separately, as Anthropic does.
"""

from collections.abc import Sequence
from typing import Final

from baton.api.errors import ApiError
from baton.api.generation.answer_stream import Usage
from baton.api.generation.choice_assembler import (
    AnsweredCall,
    AnsweredCallDelta,
    AnsweredCallStart,
    AnswerPart,
    ChoiceAssembler,
    Delta,
    whole_calls,
)
from baton.api.generation.rendering import Collected, TextKind
from baton.api.http.event_stream import Framing
from baton.api.messages.anthropic_errors import anthropic_error
from baton.api.messages.message_objects import (
    AnyDelta,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    MessageEnd,
    MessageHead,
    MessagesAnswer,
    MessagesEvent,
    MessagesUsage,
    StopReason,
)
from baton.api.messages.message_request import MessagesRequest
from baton.api.requests.call_arguments import complete_part
from baton.api.tools.parsing.output_parts import ContentDelta, ReasoningDelta
from baton.rooms.request import FinishReason

FRAMING: Final = Framing(named=True, end=b"", keep_alive=b'event: ping\ndata: {"type":"ping"}\n\n')
"""Event framing of Anthropic's streams. The keep-alive is a `ping` event, which all clients ignore."""
UNSIGNED: Final = "unsigned"
"""Signature that is sent with all reasoning, because clients drop reasoning without one. It proves nothing:
callers may write any history here. Anthropic's signature proves that reasoning was not changed."""

Chunks = list[MessagesEvent]


class MessagesRendering:
    """Renderer of one answer as a `message` object, or as the events that build it."""

    framing = FRAMING
    shows_logprobs = False

    def __init__(self, body: MessagesRequest, request_id: str) -> None:
        self._body = body
        self._request_id = request_id
        self._head: MessageHead = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": body.model,
        }
        self._hides = body.thinking is not None and body.thinking.display == "omitted"
        self._place = -1
        """Index, in the message, of the content block that was begun last; -1 before the first block."""
        self._open: type[ContentDelta] | type[ReasoningDelta] | type[AnsweredCallStart] | None = None
        """Type of the content block that was begun last. None if no block is open."""
        self._ended: tuple[ChoiceAssembler, FinishReason | None] | None = None

    def has_template(self, kind: TextKind) -> bool:
        return self._open is kind and not (self._hides and kind is ReasoningDelta)

    def opening(self, choice: ChoiceAssembler) -> Chunks:
        usage = _usage(len(choice.request.prompt), 0, 0)
        message: MessagesAnswer = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def logprobs(self, delta: Delta) -> None:
        """Return None, because this API has no log-probabilities."""

    def chunks(self, choice: ChoiceAssembler, delta: Delta) -> Chunks:
        chunks: Chunks = []
        for part in _parts(delta.text, delta.parts):
            match part:
                case AnsweredCall(_, id_, name, arguments):
                    chunks += [*self._closed(), self._call(id_, name), self._argued(arguments)]
                    self._open = AnsweredCallStart
                case AnsweredCallStart(_, id_, name):
                    chunks += [*self._closed(), self._call(id_, name)]
                    self._open = AnsweredCallStart
                case AnsweredCallDelta(_, arguments):
                    chunks.append(self._argued(arguments))
                case ContentDelta(text):
                    if self._open is not ContentDelta and self._place >= 0:
                        text = text.lstrip()  # whitespace between two blocks
                    chunks += [*self._ready(ContentDelta), self._added({"type": "text_delta", "text": text})]
                case ReasoningDelta(text):
                    chunks += self._ready(ReasoningDelta)
                    if not self._hides:
                        chunks.append(self._added({"type": "thinking_delta", "thinking": text}))
        if delta.finish is not None:
            chunks += self._closed()
            self._ended = choice, delta.finish
        return chunks

    def closing(self, usage: Usage) -> Chunks:
        assert self._ended is not None
        return [
            {"type": "message_delta", "delta": self._why(*self._ended), "usage": _counted(usage)},
            {"type": "message_stop"},
        ]

    def failure(self, error: ApiError) -> Chunks:
        return [anthropic_error(error, self._request_id)]

    def whole(self, parts: Sequence[Collected], usage: Usage) -> MessagesAnswer:
        (part,) = parts
        return {
            **self._head,
            "content": self._blocks(part),
            **self._why(part.choice, part.finish),
            "usage": _counted(usage),
        }

    def _opened(self, block: Block) -> BlockStart:
        self._place += 1
        return {"type": "content_block_start", "index": self._place, "content_block": block}

    def _added(self, delta: AnyDelta) -> BlockDelta:
        return {"type": "content_block_delta", "index": self._place, "delta": delta}

    def _closed(self) -> Chunks:
        """Return the events that close the open content block. There are none if no block is open."""
        was, self._open = self._open, None
        if was is None:
            return []
        signed: Chunks = (
            [self._added({"type": "signature_delta", "signature": UNSIGNED})] if was is ReasoningDelta else []
        )
        return [*signed, self._stopped()]

    def _stopped(self) -> BlockStop:
        return {"type": "content_block_stop", "index": self._place}

    def _ready(self, kind: type[ContentDelta] | type[ReasoningDelta]) -> Chunks:
        """Return the events that close another open content block and open one of type `kind`. There are none
        if such a block is open."""
        if self._open is kind:
            return []
        chunks: Chunks = [*self._closed(), self._opened(_empty(kind))]
        self._open = kind
        return chunks

    def _call(self, id_: str, name: str) -> BlockStart:
        return self._opened({"type": "tool_use", "id": id_, "name": name, "input": {}})

    def _argued(self, arguments: str) -> BlockDelta:
        return self._added({"type": "input_json_delta", "partial_json": arguments})

    def _blocks(self, part: Collected) -> list[Block]:
        blocks: list[Block] = []
        for each in whole_calls(_parts(part.text, part.parts)):
            last = blocks[-1] if blocks else None
            match each:
                case AnsweredCall(_, id_, name, arguments):
                    given = complete_part(arguments)
                    blocks.append({"type": "tool_use", "id": id_, "name": name, "input": given})
                case ContentDelta(text) if last is not None and last["type"] == "text":
                    last["text"] += text
                case ContentDelta(text):
                    blocks.append({"type": "text", "text": text.lstrip() if blocks else text})
                case ReasoningDelta(text):
                    thinking = "" if self._hides else text
                    if last is not None and last["type"] == "thinking":
                        last["thinking"] += thinking
                    else:
                        blocks.append({"type": "thinking", "thinking": thinking, "signature": UNSIGNED})
        return blocks

    def _why(self, choice: ChoiceAssembler, finish: FinishReason | None) -> MessageEnd:
        """Return the fields that say why the answer ended: `stop_reason` and `stop_sequence`."""
        stopped = choice.stop_string
        reason: StopReason
        if finish is FinishReason.LENGTH:
            clipped = choice.request.max_tokens < self._body.max_tokens
            reason = "model_context_window_exceeded" if clipped else "max_tokens"
        elif stopped is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if choice.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stopped}


def _empty(kind: type[ContentDelta] | type[ReasoningDelta]) -> Block:
    if kind is ContentDelta:
        return {"type": "text", "text": ""}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _parts(text: str, parts: Sequence[AnswerPart] | None) -> Sequence[AnswerPart]:
    if parts is not None:
        return parts
    return [ContentDelta(text)] if text else []


def _counted(usage: Usage) -> MessagesUsage:
    counts = _usage(usage.prompt_tokens - usage.cached_tokens, usage.cached_tokens, usage.completion_tokens)
    if usage.reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


def _usage(fresh: int, cached: int, output: int) -> MessagesUsage:
    return {
        "input_tokens": fresh,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }
