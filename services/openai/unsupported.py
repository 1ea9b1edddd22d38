"""Which of OpenAI's parameters are taken and change nothing, and which are refused for now?

Nothing is ignored that the caller would miss in the answer. A parameter that would change it and is not
served yet is refused by name, unless its value asks for what happens anyway.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from services.openai.errors import invalid

IGNORED: Final = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
)
"""They concern the platform around a model, not the answer."""

HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Not served yet; the values that ask for nothing else than what is served."""


def without_ignored(body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` without nulls and without what changes nothing. Raises ApiError for what is not served."""
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if name not in HARMLESS:
            kept[name] = value
        elif not any(type(value) is type(each) and value == each for each in HARMLESS[name]):
            raise _refused(name)
    return kept


def _refused(name: str) -> Exception:
    choices = HARMLESS[name]
    if not choices:
        return invalid(name, f"'{name}' is not supported.", "unsupported_parameter")
    allowed = " or ".join(json.dumps(each) for each in choices)
    return invalid(name, f"'{name}' is not supported, except as {allowed}.", "unsupported_value")
