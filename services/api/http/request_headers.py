"""Functions that read the headers of a request from its ASGI scope."""

import re
from collections.abc import Mapping
from typing import Final

from starlette.types import Scope

from baton.wire.text_validation import REQUEST_ID_CHARACTER

REQUEST_ID: Final = re.compile(REQUEST_ID_CHARACTER + "{1,128}")
"""Pattern of the request ids that a client may choose."""
CODEX: Final = "codex"


def first_headers(scope: Scope) -> dict[str, str]:
    """Return the first value of each request header, by name in lower case. This is faster than Starlette's
    `Headers`."""
    return {str(name, "latin-1"): str(value, "latin-1") for name, value in reversed(scope["headers"])}


def is_codex(headers: Mapping[str, str]) -> bool:
    """Return whether the client is Codex (OpenAI's coding agent), judged by `originator` and `User-Agent`."""
    return any(headers.get(name, "").lower().startswith(CODEX) for name in ("originator", "user-agent"))
