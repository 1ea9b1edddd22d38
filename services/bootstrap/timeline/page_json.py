"""JSON of the pages for operators."""

import json
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import Any


def page_json(body: Any) -> str:
    """Return the JSON text of a page, whose parts may be data classes and enums."""
    return json.dumps(body, default=_plain, ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
