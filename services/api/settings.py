"""Which bounds does the HTTP API keep?"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Sizes are bytes, times seconds."""

    body_bytes_max: int = 4 * 2**20
    body_timeout_s: float = 60.0
    """A request's body has to be there within this time."""
    stream_silence_s: float = 8.0
    """Longest time without a byte in a stream of events, once its request was read. 10 s are promised."""
    max_logprobs: int = 20
    """Most alternatives told of a token; -1: any number."""
    clip_max_tokens: bool = False
    """More output tokens than fit are as many as fit."""
    trust_request_chat_template: bool = False
    """A chat may bring a template, which is a program."""
    min_priority: int = 0
    """The lowest class that a request may ask for, which is served first."""
    tenant_header: str = ""
    """In lower case; what it says tells tenants of one caller apart. Empty: no header does."""
    log_prompts: bool = False
    """Write the beginnings of prompts and answers to the log."""
    responses_kept: int = 1024
    """Answers of the Responses API that later requests may name; 0: none."""
    responses_kept_bytes: int = 64 * 2**20
    thoughts_key: bytes = field(default=b"", repr=False)
    """Signs the thoughts that clients carry. Empty: one that is drawn."""
