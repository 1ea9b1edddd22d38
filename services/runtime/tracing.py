"""How do the spans of one request become one tree, over the processes that it passes through?

Off unless an endpoint is set: nothing of OpenTelemetry is imported then, no span is made, and what a caller
sent is passed on as it came. `services/runtime/otlp.py` is the other form.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, Protocol, TypeAlias

from services.rooms.trace import TraceContext
from services.runtime.errors import StartupError

ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""What the platform may have set for all its programs, the first one first."""
DISABLED_VARIABLE: Final = "OTEL_SDK_DISABLED"

Attribute: TypeAlias = str | bool | int | float | Sequence[str]


class Kind(Enum):
    """Who waits for whom: a server's span is what somebody else asked for."""

    SERVER = "server"
    INTERNAL = "internal"


class Span(Protocol):
    """Something that takes time. Whoever began it ends it; after that nothing of it changes."""

    trace: TraceContext
    """For its children, in this process or another."""

    def event(self, name: str, detail: str = "") -> None:
        """Something that happened just now."""

    def set(self, attributes: Mapping[str, Attribute]) -> None: ...

    def fail(self, reason: str, text: str) -> None:
        """It did not do what was asked of it. `reason` is of a closed set of words."""

    def end(self) -> None: ...


class Tracer:
    """Off: there is never a span."""

    def begin(
        self, name: str, kind: Kind, parent: TraceContext | None, attributes: Mapping[str, Attribute]
    ) -> Span | None:
        """A span that begins now. Without a parent it is the root of a trace of its own. Never waits."""
        del name, kind, parent, attributes
        return None

    async def stop(self, timeout_s: float) -> None:
        """Send what has ended, within this time; what cannot be sent is lost. Idempotent."""
        del timeout_s


OFF: Final = Tracer()


def make_tracer(
    endpoint: str, sample: float, service: str, instance: str, environ: Mapping[str, str]
) -> Tracer:
    """The tracer of a process. `endpoint`: of an OTLP collector; empty for the platform's, if it names one.

    `sample`: the share of requests without a trace of their own that get one. Raises StartupError.
    """
    platform = next((environ[name] for name in ENDPOINT_VARIABLES if environ.get(name)), "")
    if environ.get(DISABLED_VARIABLE, "").lower() == "true":
        platform = ""
    where = endpoint or platform
    if not where:
        return OFF
    if not where.startswith(("http://", "https://")):
        raise StartupError(
            f"the OTLP endpoint {where!r} is not an address: give http://host:4317, or https:// for TLS"
            f" (--otlp-endpoint, {ENDPOINT_VARIABLES[-1]})"
        )
    try:
        from services.runtime.otlp import OtlpTracer
    except ModuleNotFoundError as error:
        raise StartupError(
            f"an OTLP endpoint is set ({where}), and {error.name} is not installed: pip install"
            " 'baton-serve[otel]', or unset it"
        ) from error
    return OtlpTracer(where, sample, service, instance)
