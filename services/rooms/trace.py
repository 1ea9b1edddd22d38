"""W3C trace context of a request.

The context is passed on, and nothing depends on it: a room is the same with and without one.
"""

import re
from dataclasses import dataclass
from typing import Final

PARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
STATE_CHARS_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context: a valid `traceparent` with its `tracestate`. Made by `read_trace`, and by the code
    that starts a span."""

    parent: str
    state: str = ""

    @property
    def trace_id(self) -> str:
        return self.parent[3:35]


def read_trace(parent: str | None, state: str | None) -> TraceContext | None:
    """Return the trace context in a caller's headers, or None. An invalid one is ignored, since no request is
    refused for it."""
    if not parent or PARENT.fullmatch(parent[:55]) is None:
        return None
    if len(parent) > 55 and (parent.startswith("00") or parent[55] != "-"):
        return None  # later versions may have more fields after a dash
    whole = state is not None and len(state) <= STATE_CHARS_MAX and state.isascii() and state.isprintable()
    return TraceContext(f"00-{parent[3:55]}", state if whole and state else "")
