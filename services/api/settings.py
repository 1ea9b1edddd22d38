"""Settings of the HTTP API."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Settings of the HTTP API. Sizes are in bytes, times in seconds."""

    body_bytes_max: int = 4 * 2**20
    body_timeout_s: float = 60.0
    """Seconds within which the whole body of a request has to arrive."""
    stream_silence_s: float = 8.0
    """Longest time in seconds that an event stream sends nothing before it sends a keep-alive. At most 10 s
    are promised to clients."""
    max_logprobs: int = 20
    """Most alternative tokens whose log-probabilities are returned with each token; -1: any number."""
    clip_max_tokens: bool = False
    """Whether a `max_tokens` that does not fit is lowered to what fits, instead of refused."""
    trust_request_chat_template: bool = False
    """Whether a chat request may bring its own chat template, which is a program."""
    min_priority: int = 0
    """Lowest priority class that a request may name. Requests of a lower class are served first."""
    tenant_header: str = ""
    """Name, in lower case, of the request header that distinguishes tenants behind one API key or one
    address. Empty: no header does."""
    log_prompts: bool = False
    """Whether the beginnings of prompts and answers are written to the log."""
    responses_kept: int = 1024
    """Most responses that the Responses API stores for later requests; 0: none."""
    responses_kept_bytes: int = 64 * 2**20
    reasoning_key: bytes = field(default=b"", repr=False)
    """Key that signs the reasoning which clients store and send back, and from which the keys of event ids
    are derived. Empty: a random key is made at the start."""
