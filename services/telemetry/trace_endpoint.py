"""Choice of the OTLP collector to which a process sends its trace spans."""

import re
from collections.abc import Mapping
from typing import Final

from baton.runtime.errors import StartupError
from baton.runtime.logging import Log
from baton.runtime.service_settings import OTLP_URL
from baton.telemetry.tracing import OFF, Tracer

ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""OpenTelemetry's variables for the export protocol, in the order of preference. A platform may set them for
all its programs."""
PROTOCOL: Final = "grpc"
DISABLED_VARIABLE: Final = "OTEL_SDK_DISABLED"

PACKAGES: Final = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc"
"""Python packages that have to be installed for tracing."""

log = Log(__name__)


def make_tracer(
    endpoint: str, sample: float, service: str, instance: str, environ: Mapping[str, str]
) -> Tracer:
    """Return the tracer of a process.

    `endpoint`: URL of an OTLP collector, or empty to use OpenTelemetry's variables. `sample`: share of
    requests to trace among those whose caller has not decided it. If OTEL_SDK_DISABLED is true there are no
    traces, whatever the endpoint.

    Raises StartupError if `endpoint` cannot be used. An endpoint from a variable may be meant for other
    programs. If it cannot be used, a log line says so, and there are no traces.
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
    """Return a tracer that exports to `endpoint`. Raises StartupError, whose text omits `endpoint`, since
    that may contain a password."""
    if not re.fullmatch(OTLP_URL, endpoint, re.ASCII):
        raise StartupError(
            f"{given_by} is not the address of an OTLP endpoint: give http://host:4317, or https:// for TLS,"
            " without a name or password"
        )
    try:
        from baton.telemetry.otlp_tracer import OtlpTracer
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
