"""What does the HTTP API need from whoever serves tokens?

The API layer renders, validates, tokenises, detokenises and speaks HTTP; a `Backend` turns one
resolved request into a stream of tokens. In production that is the bootstrap's room follower; in the
API's own tests it is a few lines.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from baton.rooms.errors import Reason
from baton.rooms.request import FinishReason, Request, Score, Token


class Hangup(Enum):
    """Why the API layer stops reading a stream before it finished by itself."""

    CLIENT_GONE = "client_gone"
    STOP_STRING = "stop_string"
    REQUEST_FAILED = "request_failed"
    """A prompt of the same request failed, and the request with it: its client is still there."""


def client_gone() -> Hangup:
    return Hangup.CLIENT_GONE


class BackendError(Exception):
    """A request that could not be served; the text is for the caller."""


class Overloaded(BackendError):
    """Queues are full. `retry_after_s`: when it is worth another try."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorker(BackendError):
    """No worker of a role can take it. The message names the role."""


class RoomFailed(BackendError):
    """The room failed after admission, before its first token or behind any."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class TokenBatch(NamedTuple):
    """Tokens of one choice in order, in one message per engine step at most; `finish` comes with the choice's
    last batch."""

    tokens: tuple[Token, ...]
    finish: FinishReason | None = None
    choice: int = 0
    """Of the request's."""
    scores: tuple[Score, ...] = ()
    """Of the prompt, from its second token on, where it is scored: all of them, with the first token."""


class TokenStream(Protocol):
    """One request being served. The reader must end it: by reading to `finish`, of each of its choices, or by
    `hang_up`."""

    cached_tokens: int
    """Prompt tokens whose KV was reused; known once the first batch was read."""

    async def next(self) -> TokenBatch:
        """The next batch; none of a choice follows the one with `finish`. Raises RoomFailed when the room
        fails, and with it all choices.

        Not an asynchronous generator, which its reader leaves unfinished: the loop ends each in a task of
        its own.
        """

    def end_choice(self, choice: int) -> None:
        """The reader has all that it wants of one choice, and no batch of it comes any more; others go on."""

    async def hang_up(self, why: Hangup) -> None:
        """Stop both workers within a turn. Idempotent, also after the end. Never raises."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the stack that is up right now can hold."""

    context_tokens: int
    """Prompt plus output, of the model."""
    prompt_tokens: int
    """Longest prompt that a prefill cache can ever hold (0: no worker is known yet)."""
    sequence_tokens: int
    """Longest prompt plus output that a decode cache can ever hold (0: no worker is known yet)."""
    sequence_tokens_now: int = 0
    """The same of the workers that get requests now (0: none is known yet)."""
    page_tokens: int = 1
    """Of one page of a decode cache: several choices share whole pages of their prompt."""
    quantize: str | None = None
    """As what the workers hold the model's weights (None: no worker is known yet)."""
    alone_tokens: int = 0
    """Longest prompt that a decode worker can ever compute itself (0: none that does is known). It scores no
    prompt."""


class Backend(Protocol):
    def limits(self) -> Limits: ...

    async def generate(self, request: Request, why: Callable[[], Hangup] = client_gone) -> TokenStream:
        """Admit the request and open its room. Raises Overloaded or NoWorker. Cancelled while
        it waits, it leaves nothing behind but a note of the reason, which is `why`."""
