"""Reader of JSON texts from clients, with a limit on their depth."""

import json
from typing import Any, Final

from pydantic_core import from_json

LEVELS_MAX: Final = 240
"""Most levels of nested lists and objects: enough for a JSON schema of 100 nested objects. Responses that
repeat parts of a request are written by a library that allows 255."""


class TooDeep(ValueError):
    """Error: a JSON text has more than LEVELS_MAX levels of nested lists and objects."""

    def __init__(self) -> None:
        super().__init__(f"it is nested more than {LEVELS_MAX} levels deep")


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is invalid, and TooDeep, a subclass of it."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        if "recursion limit" not in str(error):
            raise
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise TooDeep from None
    if _levels(value) > LEVELS_MAX:
        raise TooDeep
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # raises for surrogates, infinity
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _levels(value: Any) -> int:
    levels, current = 0, [value]
    while current := [each for each in current if isinstance(each, dict | list)]:
        levels += 1
        current = [inner for each in current for inner in (each.values() if isinstance(each, dict) else each)]
    return levels
