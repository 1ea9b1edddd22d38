"""A tracer whose spans stay in the test."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from baton.rooms.trace import TraceContext, read_trace
from baton.telemetry.tracing import Attribute, SpanKind, Tracer

TRACE: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT: Final = read_trace(f"00-{TRACE}-00f067aa0ba902b7-01", "vendor=1")


@dataclass
class Noted:
    """A span that stays in the test."""

    trace: TraceContext
    parent: TraceContext | None
    attributes: dict[str, Attribute]
    events: list[str] = field(default_factory=list)
    error: str | None = None
    ended: int = 0

    def event(self, name: str, detail: str = "") -> None:
        assert not self.ended, f"{name} behind its end"
        self.events.append(name)

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        self.attributes.update(attributes)

    def fail(self, reason: str, text: str) -> None:
        self.error = f"{reason}: {text}"

    def end(self) -> None:
        self.ended += 1


class Notes(Tracer):
    def __init__(self) -> None:
        self.spans: list[Noted] = []

    def begin(
        self, name: str, kind: SpanKind, parent: TraceContext | None, attributes: Mapping[str, Attribute]
    ) -> Noted:
        trace = TraceContext(f"00-{TRACE}-{len(self.spans) + 1:016x}-01")
        self.spans.append(Noted(trace, parent, dict(attributes)))
        return self.spans[-1]
