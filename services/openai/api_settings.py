"""Which bounds does the HTTP API keep?"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Sizes are bytes, times seconds."""

    body_bytes_max: int = 4 * 2**20
    body_timeout_s: float = 60.0
    """A request's body has to be there within this time."""
    clip_max_tokens: bool = False
    """More output tokens than fit are as many as fit."""
    log_prompts: bool = False
    """Write the beginnings of prompts and answers to the log."""
