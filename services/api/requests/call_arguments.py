"""Arguments of a tool call as a JSON object, even if the call was cut off.

If `max_tokens` ends a stream within a tool call, the client has got only the beginning of the arguments. It
sends that text back unchanged in its next request. So both a JSON object and the beginning of one are
accepted.

No I/O, clock or threads.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import from_json

ESCAPES: Final = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u([dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
"""Pattern of one JSON escape. Its group matches only a lone surrogate, which stands for no character. A pair
of surrogates matches without the group."""
EMPTY: Final = "{}"


def arguments_object(text: str) -> dict[str, Any]:
    """Return the arguments as an object. If the text was cut off, return the complete part of it. A lone
    surrogate becomes U+FFFD.

    Raises ValueError if the text is not the beginning of a JSON object.
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
    """Return the arguments as an object, without a string at the end that was cut off. Anthropic's client
    libraries read an unfinished stream in the same way."""
    try:
        value = from_json(arguments or EMPTY, allow_partial=True)
    except ValueError:
        return arguments_object(arguments)
    return value if isinstance(value, dict) else {}


def arguments_text(value: str | Mapping[str, Any]) -> str:
    """Return the arguments as JSON text, unchanged if they are text. Raises ValueError if the text is not the
    beginning of a JSON object."""
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    arguments_object(value)
    return value.strip() or EMPTY


def _is_followed(text: str) -> bool:
    """Return whether the text begins with a complete JSON value that other text follows. Such a text is no
    cut-off value."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return bool(text[end:].strip())
