"""Functions that read the headers of a request from its ASGI scope."""

import re
from collections.abc import Mapping
from typing import Final

from starlette.types import Scope

from baton.wire.text_validation import REQUEST_ID_CHARACTER

REQUEST_ID: Final = re.compile(REQUEST_ID_CHARACTER + "{1,128}")
"""Pattern of the request ids that a client may choose."""
CODEX: Final = "codex"
AIOHTTP: Final = re.compile(r"Python/\S+ aiohttp/")
"""Beginning of the `User-Agent` that aiohttp sends by default."""


def first_headers(scope: Scope) -> dict[str, str]:
    """Return the first value of each request header, by name in lower case. This is faster than Starlette's
    `Headers`."""
    return {str(name, "latin-1"): str(value, "latin-1") for name, value in reversed(scope["headers"])}


def is_codex(headers: Mapping[str, str]) -> bool:
    """Return whether the client is Codex (OpenAI's coding agent), judged by `originator` and `User-Agent`."""
    return any(headers.get(name, "").lower().startswith(CODEX) for name in ("originator", "user-agent"))


def takes_events_for_lines(headers: Mapping[str, str]) -> bool:
    """Return whether the client may take each event of a stream for one line with data, so that an id breaks
    it.

    The load generators of vLLM and SGLang do. They send aiohttp's own `User-Agent`. A client that sends
    `Last-Event-ID` reads ids.
    """
    return "last-event-id" not in headers and AIOHTTP.match(headers.get("user-agent", "")) is not None
