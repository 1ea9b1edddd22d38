"""How do the spans of one request become one tree, over the processes that it passes through?

Off unless an endpoint is set: nothing of OpenTelemetry is imported then, no span is made, and what a caller
sent is passed on as it came. `services/runtime/otlp.py` is the other form.
"""

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, Protocol, TypeAlias

from services.rooms.trace import TraceContext
from services.runtime.errors import StartupError
from services.runtime.logging import Log

ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""What the platform may have set for all its programs, the first one first."""
PROTOCOL: Final = "grpc"
ENDPOINT: Final = r"https?://[^\s@]+"
"""Without a name and password: it is written to the log."""
DISABLED_VARIABLE: Final = "OTEL_SDK_DISABLED"

PACKAGES: Final = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc"
"""That traces need."""

log = Log(__name__)

Attribute: TypeAlias = str | bool | int | float | Sequence[str]


class SpanKind(Enum):
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
        self, name: str, kind: SpanKind, parent: TraceContext | None, attributes: Mapping[str, Attribute]
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

    `sample`: the share of requests without a trace of their own that get one. Off where OTEL_SDK_DISABLED is
    true, whoever named the endpoint: the SDK makes no spans then. Raises StartupError where `endpoint` cannot
    be used. The platform's may be meant for other programs: where that one cannot be used, a line of the log
    says so, and there are no traces.
    """
    if environ.get(DISABLED_VARIABLE, "").strip().lower() == "true":
        if endpoint:
            log.warning("no traces, though --otlp-endpoint is set", cause=f"{DISABLED_VARIABLE} is true")
        return OFF
    if endpoint:
        return _tracer(endpoint, "--otlp-endpoint", sample, service, instance)
    variable = next((name for name in ENDPOINT_VARIABLES if environ.get(name)), None)
    if variable is None:
        return OFF
    try:
        _check_protocol(environ)
        return _tracer(environ[variable], variable, sample, service, instance)
    except StartupError as error:
        log.warning("no traces: what the platform set for OTLP cannot be used", cause=str(error))
        return OFF


def _check_protocol(environ: Mapping[str, str]) -> None:
    for name in PROTOCOL_VARIABLES:
        if environ.get(name):
            if environ[name] != PROTOCOL:
                raise StartupError(f"{name} is {environ[name]!r}, and traces leave by {PROTOCOL} alone")
            return


def _tracer(endpoint: str, given_by: str, sample: float, service: str, instance: str) -> Tracer:
    """What it raises does not quote `endpoint`: there may be a password in it."""
    if not re.fullmatch(ENDPOINT, endpoint, re.ASCII):
        raise StartupError(
            f"{given_by} is not the address of an OTLP endpoint: give http://host:4317, or https:// for TLS,"
            " without a name or password"
        )
    try:
        from services.runtime.otlp import OtlpTracer
    except ModuleNotFoundError as error:
        raise StartupError(
            f"{given_by} is set, and {error.name} is not installed: pip install {PACKAGES}, or unset it"
        ) from error
    try:
        return OtlpTracer(endpoint, sample, service, instance)
    except (ValueError, OSError) as error:
        raise StartupError(
            f"no exporter can be made of {given_by} and the other OTEL_ variables: {type(error).__name__}"
        ) from error
