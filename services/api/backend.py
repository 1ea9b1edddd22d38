"""Interface between the HTTP API and the service that generates tokens.

The API validates a request, renders and tokenises its prompt, and detokenises its output. A `Backend` turns
one resolved request into a stream of tokens. In production, the backend opens a room for it: the request's
run on one prefill and one decode worker. In the API's own tests it is a few lines of code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from baton.rooms.errors import Reason
from baton.rooms.request import Request, TokenBatch
from baton.rooms.worker_facts import ServedEngine


class Hangup(Enum):
    """Reason why the API stops reading a token stream before its end. It is given to
    `TokenStream.hang_up`."""

    CLIENT_GONE = "client_gone"
    STOP_STRING = "stop_string"
    REQUEST_FAILED = "request_failed"
    """Another prompt of the same client request failed, so the whole request fails. The client is still
    connected."""


def client_gone() -> Hangup:
    return Hangup.CLIENT_GONE


class BackendError(Exception):
    """Error of a valid request that could not be served. Its text is shown to the client."""


class Overloaded(BackendError):
    """Error: a queue or a memory limit for requests is full. `retry_after_s`: seconds after which the client
    should try again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorker(BackendError):
    """Error: no prefill worker or no decode worker can take the request. The message says which."""


class RoomFailed(BackendError):
    """Error: a request failed on its workers, before or after its first token. A room is the request's run on
    one prefill and one decode worker.

    `reason`: cause of the failure.
    """

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class TokenStream(Protocol):
    """Output stream of one request that is being served. The reader must finish it: read every choice up to
    its `finish`, or call `hang_up`."""

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens whose KV was taken from a prefix cache. Known after the first batch."""

    async def next(self) -> TokenBatch:
        """Return the next batch of any choice. A choice has no further batch after the one with `finish`.
        Raises RoomFailed if the room fails, which ends all choices. Raises Overloaded or NoWorker if every
        room of the request was refused by a full worker, and it got no other in time.

        The stream is not an asynchronous generator, because the event loop would close each unfinished
        generator in a task of its own.
        """

    def end_choice(self, choice: int) -> None:
        """Stop generating one choice: no more batches of it are returned. The other choices continue."""

    async def hang_up(self, why: Hangup) -> None:
        """Abort the request: both workers stop it within one turn of their loops. Idempotent, also after the
        end. Never raises."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Token limits of the model and of the running workers, and properties that all workers share."""

    context_tokens: int
    """Context length of the model: most tokens of prompt and output together."""
    prompt_tokens: int
    """Longest prompt, in tokens, that fits the KV cache of the largest prefill worker. 0: no worker is known
    yet."""
    sequence_tokens: int
    """Longest prompt and output together, in tokens, that fit the KV cache of the largest decode worker. 0:
    no worker is known yet."""
    sequence_tokens_now: int = 0
    """Longest prompt and output together, in tokens, that fit the KV cache of a decode worker that takes new
    requests at present. 0: no worker is known yet."""
    page_tokens: int = 1
    """Tokens per page of a decode worker's KV cache. The choices of one request share whole pages of the
    prompt."""
    quantize: str | None = None
    """Quantization format in which workers hold the model's weights. None: no worker is known yet."""
    alone_tokens: int = 0
    """Longest prompt, in tokens, that a decode worker can compute without a prefill worker. Prompts that are
    scored are never computed in this way. 0: no decode worker is known that computes prompts."""
    engine: ServedEngine | None = None
    """Name, number format and guarantees of the workers' engine. None: no worker is known yet."""

    @property
    def whole_prompts(self) -> bool:
        """Whether the engine computes a prompt in a single step only. A request may then have only one
        choice, and its prompt's tokens are not scored."""
        return self.engine is not None and self.engine.whole_prompts


class Backend(Protocol):
    def limits(self) -> Limits: ...

    async def generate(self, request: Request, why: Callable[[], Hangup] = client_gone) -> TokenStream:
        """Wait for workers with capacity, open a room for the request, and return its stream of tokens.
        Raises Overloaded or NoWorker. `why`: called if the wait is cancelled; returns the reason to
        record."""
