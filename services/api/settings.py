"""Settings of the HTTP API."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Settings of the HTTP API. Sizes are bytes, times seconds."""

    body_bytes_max: int = 4 * 2**20
    body_timeout_s: float = 60.0
    """Time within which a request's body has to arrive."""
    stream_silence_s: float = 8.0
    """Longest time without a byte in a stream of events, after its request was read. 10 s are promised."""
    max_logprobs: int = 20
    """Most alternatives shown with a token; -1: any number."""
    clip_max_tokens: bool = False
    """Whether `max_tokens` is lowered to what fits."""
    trust_request_chat_template: bool = False
    """Whether a chat may bring a template, which is a program."""
    min_priority: int = 0
    """Lowest priority class that a request may name. The lowest is served first."""
    tenant_header: str = ""
    """Header that distinguishes the tenants of one caller, in lower case. Empty: none."""
    log_prompts: bool = False
    """Whether the beginnings of prompts and answers are logged."""
    responses_kept: int = 1024
    """Responses that the Responses API stores for later requests; 0: none."""
    responses_kept_bytes: int = 64 * 2**20
    reasoning_key: bytes = field(default=b"", repr=False)
    """Key that signs reasoning which clients carry. Empty: a random one."""
