"""The interface between the HTTP API and what serves tokens.

The API renders, validates, tokenises and detokenises. A `Backend` turns one resolved request into a stream
of tokens. In production it is the bootstrap's rooms, in the API's own tests a few lines.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from baton.rooms.errors import Reason
from baton.rooms.request import FinishReason, Request, Score, Token
from baton.rooms.worker_facts import ServedEngine


class Hangup(Enum):
    """Reason why the API stops reading a stream before its end."""

    CLIENT_GONE = "client_gone"
    STOP_STRING = "stop_string"
    REQUEST_FAILED = "request_failed"
    """Another prompt of the same request failed, and the request with it. The client is still there."""


def client_gone() -> Hangup:
    return Hangup.CLIENT_GONE


class BackendError(Exception):
    """A request could not be served. The text is for the caller."""


class Overloaded(BackendError):
    """Queues are full. `retry_after_s`: time after which another try makes sense."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorker(BackendError):
    """No worker of a role can take the request. The message names the role."""


class RoomFailed(BackendError):
    """The room failed after admission, before or after its first token."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class TokenBatch(NamedTuple):
    """Tokens of one choice, in order: at most one batch for each engine step. The choice's last batch has a
    `finish`."""

    tokens: tuple[Token, ...]
    finish: FinishReason | None = None
    choice: int = 0
    """Index of the choice among the request's."""
    scores: tuple[Score, ...] = ()
    """Scores of the prompt's tokens from the second on, if it is scored. All of them come with the first
    token."""


class TokenStream(Protocol):
    """One request that is being served. The reader must end it: by reading every choice to its `finish`, or
    by `hang_up`."""

    cached_tokens: int
    """Prompt tokens whose KV was reused, known after the first batch."""

    async def next(self) -> TokenBatch:
        """Return the next batch; none of a choice follows the one with `finish`. Raises RoomFailed when the
        room fails, and all choices with it.

        It is no asynchronous generator: the loop would end each unfinished one in a task of its own.
        """

    def end_choice(self, choice: int) -> None:
        """Stop one choice: no more batches of it come. The others continue."""

    async def hang_up(self, why: Hangup) -> None:
        """Stop both workers within a turn. Idempotent, also after the end. Never raises."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the running stack can hold."""

    context_tokens: int
    """Prompt and output tokens that the model supports."""
    prompt_tokens: int
    """Longest prompt that a prefill cache can ever hold. 0: no worker is known yet."""
    sequence_tokens: int
    """Longest prompt and output that a decode cache can ever hold. 0: no worker is known yet."""
    sequence_tokens_now: int = 0
    """The same for the workers that get requests now. 0: none is known yet."""
    page_tokens: int = 1
    """Tokens per page of a decode cache. Choices share whole pages of their prompt."""
    quantize: str | None = None
    """Format in which workers hold the model's weights. None: no worker is known yet."""
    alone_tokens: int = 0
    """Longest prompt that a decode worker can ever compute itself, without scores. 0: none that does is
    known."""
    engine: ServedEngine | None = None
    """What the workers promise. None: no worker is known yet."""

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt is computed in one step only: one choice, and no scores of the prompt."""
        return self.engine is not None and self.engine.whole_prompts


class Backend(Protocol):
    def limits(self) -> Limits: ...

    async def generate(self, request: Request, why: Callable[[], Hangup] = client_gone) -> TokenStream:
        """Admit the request and open its room. Raises Overloaded or NoWorker. If it is cancelled while it
        waits, only the reason `why` is noted."""
