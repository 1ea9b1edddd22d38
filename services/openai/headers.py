"""What did a request say in one header? (Starlette's object of all of them is made anew for each.)"""

import re
from typing import Final

from starlette.types import Scope

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""That a caller may give."""


def header(scope: Scope, name: bytes) -> str | None:
    """The first of that name, which is given in lower case."""
    for known, value in scope["headers"]:
        if known == name:
            return str(value, "latin-1")
    return None
