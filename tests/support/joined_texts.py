"""Streams of events whose text is joined, for comparisons: where a text is cut depends on the time."""

from collections.abc import Iterable
from typing import Any, Final

TEXT_FIELDS: Final = ("content", "text", "thinking", "reasoning_content", "reasoning")


class Unlike(Exception):
    """Error: two events differ in more than their texts."""


def join_texts(events: Iterable[Any]) -> list[Any]:
    """Return events in which neighbours that differ only in the text that they add are one event."""
    joined: list[Any] = []
    for event in events:
        if joined and _has_text(event):
            try:
                joined[-1] = _join(joined[-1], event)
                continue
            except Unlike:
                pass
        joined.append(event)
    return joined


def _join(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {
            key: value + other[key]
            if key in TEXT_FIELDS and isinstance(value, str) and isinstance(other[key], str)
            else _join(value, other[key])
            for key, value in one.items()
        }
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_join(*both) for both in zip(one, other, strict=True)]
    if one != other:
        raise Unlike
    return one


def _has_text(value: Any) -> bool:
    if isinstance(value, dict):
        return any(
            (key in TEXT_FIELDS and isinstance(each, str)) or _has_text(each) for key, each in value.items()
        )
    return isinstance(value, list) and any(map(_has_text, value))
