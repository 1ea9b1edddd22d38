"""What did a request say in one header? (Starlette's object of all of them is made anew for each.)"""

import re
from typing import Final

from starlette.types import Scope

from baton.wire.text_validation import REQUEST_ID_CHARACTER

REQUEST_ID: Final = re.compile(REQUEST_ID_CHARACTER + "{1,128}")
"""That a caller may give."""
CODEX: Final = "codex"


def header(scope: Scope, name: bytes) -> str | None:
    """The first of that name, which is given in lower case."""
    for known, value in scope["headers"]:
        if known == name:
            return str(value, "latin-1")
    return None


def is_codex(scope: Scope) -> bool:
    """Whether the caller is Codex, by the headers in which it names itself."""
    names = (header(scope, b"originator"), header(scope, b"user-agent"))
    return any(name is not None and name.lower().startswith(CODEX) for name in names)
