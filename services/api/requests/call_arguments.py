"""Arguments of a tool call as a JSON object, also those of a call that was cut off.

A stream that `max_tokens` ended within a call has returned the beginning of its arguments. A client sends
that back unchanged. A JSON object or the beginning of one is therefore accepted.

Pure.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import from_json

ESCAPES: Final = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u([dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
"""A pair of surrogates, a lone one (the group), or any other escape."""
EMPTY: Final = "{}"


def arguments_object(text: str) -> dict[str, Any]:
    """Return the object, or what a cut-off text has of it. Half a surrogate pair becomes U+FFFD.

    Raises ValueError for a text that begins no JSON object.
    """
    text = text.strip() or EMPTY
    mended = ESCAPES.sub(lambda found: r"\ufffd" if found[1] else found[0], text)
    try:
        value = from_json(mended, allow_inf_nan=False)
    except ValueError:
        if _is_followed(mended):
            raise
        value = from_json(mended, allow_inf_nan=False, allow_partial="trailing-strings")
    if not isinstance(value, dict):
        raise ValueError("no JSON object")  # noqa: TRY004 - of a text, whatever it holds
    return value


def complete_part(arguments: str) -> dict[str, Any]:
    """Return the object without a string that was cut off, as Anthropic's client libraries read an
    unfinished stream."""
    try:
        value = from_json(arguments or EMPTY, allow_partial=True)
    except ValueError:
        return arguments_object(arguments)
    return value if isinstance(value, dict) else {}


def arguments_text(value: str | Mapping[str, Any]) -> str:
    """Return arguments as text, unchanged if they are text. Raises ValueError as `arguments_object`."""
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    arguments_object(value)
    return value.strip() or EMPTY


def _is_followed(text: str) -> bool:
    """Whether a complete JSON value is followed by something else."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return bool(text[end:].strip())
