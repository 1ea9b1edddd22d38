"""Headers of a request, read from its ASGI scope."""

import re
from collections.abc import Mapping
from typing import Final

from starlette.types import Scope

from baton.wire.text_validation import REQUEST_ID_CHARACTER

REQUEST_ID: Final = re.compile(REQUEST_ID_CHARACTER + "{1,128}")
"""Request ids that a caller may choose."""
CODEX: Final = "codex"


def first_headers(scope: Scope) -> dict[str, str]:
    """Return the first value of each header, by its name in lower case. Starlette's `Headers` are slower."""
    return {str(name, "latin-1"): str(value, "latin-1") for name, value in reversed(scope["headers"])}


def is_codex(headers: Mapping[str, str]) -> bool:
    """Whether the caller is Codex, by the headers in which it names itself."""
    return any(headers.get(name, "").lower().startswith(CODEX) for name in ("originator", "user-agent"))
