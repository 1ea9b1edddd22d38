"""Settings of `baton chat`."""

from dataclasses import dataclass
from typing import Final

from baton.launch.serve_settings import DEFAULT_URL
from baton.runtime.setting_kinds import TEXT, matching, number, optional
from baton.runtime.settings import setting

MOST_TOKENS: Final = optional(number(1, 10**6), None)
API: Final = "/v1"
URL: Final = matching(r"https?://[^\s/?#]+(/[^\s?#]*)?", "URL", "an address such as http://127.0.0.1:8000")
TEMPERATURE: Final = matching(r"\d(\.\d{1,6})?", "T", "a number from 0 to 9.99, such as 0.7")


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Command-line settings of `baton chat`: the server, and the sampling parameters of its requests."""

    url: str = setting(DEFAULT_URL, "Where the server is, with or without /v1.", URL)
    system: str = setting("", "Instruction put before the conversation.", TEXT)
    max_tokens: int | None = setting(
        None, "Most tokens per answer (not given: what the server gives).", MOST_TOKENS
    )
    temperature: str = setting("0", "Randomness; 0 always gives the same answer.", TEMPERATURE)


def base_of(url: str) -> str:
    """Return `url` without a trailing /v1, to which API paths are appended. OpenAI's clients take URLs with
    /v1."""
    return url.rstrip("/").removesuffix(API)
