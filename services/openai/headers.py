"""What did a request say in one header? (Starlette's object of all of them is made anew for each.)"""

from starlette.types import Scope


def header(scope: Scope, name: bytes) -> str | None:
    """The first of that name, which is given in lower case."""
    for known, value in scope["headers"]:
        if known == name:
            return str(value, "latin-1")
    return None
