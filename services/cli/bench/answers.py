"""What did a streamed answer of an OpenAI-compatible server say, and when did its tokens come?

A *chunk* is an event that brought text (or, in the completions API, any choice: a token may have no text of
its own). Chunks are not tokens, a server may put several into one; tokens are counted by its `usage`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from baton.cli.bench.stream_client import Reply

DONE: Final = b"[DONE]"
TOLD_CHARS: Final = 300
REFUSALS: Final = frozenset({429, 503})
"""Statuses of a server that is too busy; either may say when to come again."""


class AnswerFailed(Exception):
    """The server answered, but not with tokens. The text is the server's."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's life. Times by `time.perf_counter`."""

    due: float
    """When it was to be sent: the schedule's time, or the time its caller turned to it where nothing was
    scheduled."""
    sent: float
    chunks: tuple[float, ...]
    """When each chunk came; at least one."""
    ended: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        """From when it was due: what waits in this client waits for the server."""
        return self.chunks[0] - self.due

    @property
    def tpot_s(self) -> float | None:
        """Per output token after the first, none if there is one token."""
        return (
            (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None
        )

    @property
    def chunk_gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def token_gaps_s(self) -> list[float]:
        """The gaps shared out among the tokens that the later chunk brought, by the answer's mean tokens a
        chunk. The same as `chunk_gaps_s` if every chunk brought one."""
        if self.output_tokens < 2:
            return []
        share = (len(self.chunks) - 1) / (self.output_tokens - 1)
        return [gap * share for gap in self.chunk_gaps_s]


def understand(reply: Reply, due: float) -> Answer:
    """Raises AnswerFailed."""
    if reply.status != 200:
        raise AnswerFailed(f"HTTP {reply.status}: {error_text(reply.body)}")
    chunks: list[float] = []
    usage: dict[str, Any] | None = None
    finished = False
    for at, data in _events(reply.pieces):
        if data == DONE:
            finished = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            raise AnswerFailed(f"an event is not JSON: {data[:TOLD_CHARS]!r}") from None
        if "error" in event:
            raise AnswerFailed(error_text(data))
        usage = event.get("usage") or usage
        if any(_brings(choice) for choice in event.get("choices") or ()):
            chunks.append(at)
    if not chunks:
        raise AnswerFailed("the answer has no tokens")
    if not finished:
        raise AnswerFailed("the answer ends without [DONE]")
    if usage is None:
        raise AnswerFailed("the answer has no usage, though stream_options.include_usage asked for it")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        due=due,
        sent=reply.sent,
        chunks=tuple(chunks),
        ended=reply.ended,
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
    )


def error_text(body: bytes) -> str:
    """What went wrong, from a body of OpenAI's shape or any other."""
    try:
        value = json.loads(body)
        return str(value["error"]["message"])[:TOLD_CHARS]
    except (ValueError, KeyError, TypeError):
        return body[:TOLD_CHARS].decode(errors="replace")


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of each event, with the time of the read that completed its line."""
    rest = b""
    for at, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line[5:].strip()


def _brings(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return True
    return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))
