"""Errors for invalid fields, with a message and a field path that the client would write.

The validating library, pydantic, has its own names for types and for the steps of a path. None of them
appears in an error.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pydantic_core import ErrorDetails

from baton.api.errors import ApiError, invalid, shown
from baton.api.requests.unsupported_fields import OPENAI_UNSUPPORTED, UnsupportedFields

Words = Callable[[Mapping[str, Any]], str]

TYPES: Final[Mapping[str, str]] = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a text",
}
"""Name of the expected type, for error messages, by pydantic's error code for a value of the wrong type."""
VALUES: Final[Mapping[str, Words]] = {
    "finite_number": lambda _: "it has to be a finite number",
    "greater_than": lambda told: f"it has to be above {_number(told['gt'])}",
    "greater_than_equal": lambda told: f"it has to be at least {_number(told['ge'])}",
    "int_parsing_size": lambda _: "it has too many digits",
    "less_than": lambda told: f"it has to be below {_number(told['lt'])}",
    "less_than_equal": lambda told: f"it has to be at most {_number(told['le'])}",
    "literal_error": lambda told: f"it has to be {told['expected']}",
    "string_too_long": lambda told: f"it is longer than {told['max_length']} characters",
    "string_too_short": lambda _: "it is empty",
    "too_long": lambda told: f"it holds more than {told['max_length']} elements",
    "too_short": lambda _: "it is empty",
}
OWN_TYPES: Final = frozenset({"arguments_type", "choice_type", "content_type", "prompt_type", "schema_type"})
"""Error codes of Baton's own validators for a value of the wrong type. pydantic's codes are in `TYPES`."""
QUOTE: Final = "'"
NEIGHBOUR_CUTOFF: Final = 0.75


def first_fault(
    details: Sequence[ErrorDetails],
    body: Any,
    known: Mapping[str, Sequence[str]],
    unserved: UnsupportedFields = OPENAI_UNSUPPORTED,
) -> ApiError:
    """Return the one error to report for an invalid `body`. Fields that are not supported come first, unknown
    ones last.

    `known`: names of the fields of each object, by its path. "" is the body itself, and an index is written
    `[]`.
    """
    error = min(details, key=_rank)
    kind = error["type"]
    param = shown(path(error["loc"], body, missing=kind == "missing"))
    told = error.get("ctx", {})
    match kind:
        case "missing":
            return invalid(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")
        case "union_tag_not_found":
            where = f"{param}.{told['discriminator'].strip(QUOTE)}"
            return invalid(where, f"Missing required parameter: '{where}'.", "missing_required_parameter")
        case "union_tag_invalid":
            where = f"{param}.{told['discriminator'].strip(QUOTE)}"
            why = f"'{shown(told['tag'])}' is not served; it has to be one of {told['expected_tags']}"
            return invalid(where, f"Invalid value for '{where}': {why}.")
        case "unsupported":
            return unserved.not_supported(param)
        case "extra_forbidden":
            return _unknown(param, own_steps(error["loc"], body), known, unserved)
        case _ if kind in TYPES:
            return _wrong_type(param, f"it has to be {TYPES[kind]}")
        case _ if kind in OWN_TYPES:
            return _wrong_type(param, error["msg"])
        case _ if kind in VALUES:
            return invalid(param, f"Invalid value for '{param}': {VALUES[kind](told)}.")
        case _:
            return invalid(param, f"Invalid value for '{param}': {error['msg']}.")


def _rank(error: ErrorDetails) -> int:
    return {"unsupported": 0, "extra_forbidden": 2}.get(error["type"], 1)


def _wrong_type(param: str, why: str) -> ApiError:
    return invalid(param, f"Invalid type for '{param}': {why}.", "invalid_type")


def _unknown(
    param: str, steps: Sequence[Any], known: Mapping[str, Sequence[str]], unserved: UnsupportedFields
) -> ApiError:
    name = str(steps[-1])
    shape = ".".join("[]" if isinstance(step, int) else str(step) for step in steps[:-1])
    if name in unserved.known.get(shape, ()):
        return unserved.not_supported(param)
    # A long name is no misspelt field, and comparing it takes long.
    near = difflib.get_close_matches(name[:64], known.get(shape, ()), n=1, cutoff=NEIGHBOUR_CUTOFF)
    meant = f"; did you mean '{near[0]}'?" if near else "."
    return invalid(param, f"Unrecognized request argument supplied: {param}{meant}", "unknown_parameter")


def path(loc: tuple[Any, ...], body: Any, *, missing: bool = False) -> str:
    """Return the path of a field as text: `("messages", 0, "role")` becomes `messages[0].role`. `loc`:
    pydantic's error path."""
    text = ""
    for step in own_steps(loc, body, missing=missing):
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def own_steps(loc: tuple[Any, ...], body: Any, *, missing: bool = False) -> list[Any]:
    """Return those steps of pydantic's error path `loc` that exist in the client's body. Other steps name
    types of pydantic. If a field is `missing`, the last step is its name and stays."""
    steps, value, last = [], body, len(loc) - 1
    for place, step in enumerate(loc):
        named = isinstance(value, dict) and step in value
        if named or (isinstance(value, list) and isinstance(step, int) and step < len(value)):
            value = value[step]
        elif not (missing and place == last):
            continue
        steps.append(step)
    return steps


def _number(bound: float) -> str:
    """Return a numeric bound as text. A whole number is written with all its digits."""
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"
