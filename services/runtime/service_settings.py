"""Settings that every service has."""

from dataclasses import dataclass
from typing import Final

from baton.runtime.model_options import POSITIONS_MAX, LoadFormat
from baton.runtime.setting_kinds import DURATION_MS, HOST, SHARE, TEXT, choices, matching, number, optional
from baton.runtime.settings import setting
from baton.runtime.tls_files import TlsFiles, tls_files

LOG_LEVEL: Final = choices("debug", "info", "warning", "error")
LOG_FORMAT: Final = choices("text", "json")
LOAD_FORMAT: Final = choices(*(each.value for each in LoadFormat))
OTLP_URL: Final = r"https?://[^\s@]+"
"""Pattern of a trace collector's URL. It allows no user name and password, because the URL is logged."""
COLLECTOR: Final = matching(f"({OTLP_URL})?", "URL", "http://host:port, or https:// for TLS")
RUN_TOKEN: Final = matching("[!-~]{16,512}", "TOKEN", "16 to 512 visible ASCII characters")
HOST_OR_NONE: Final = optional(HOST, "")


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Settings common to bootstrap, prefill and decode."""

    host: str = setting("127.0.0.1", "Address to listen on.", HOST)
    load_format: str = setting(
        LoadFormat.AUTO.value,
        "Which weights, the same on every service: the model's (auto), or any numbers in their shapes (dummy)"
        ", to measure a model by its configuration and tokenizer alone.",
        LOAD_FORMAT,
    )
    context_length: int = setting(
        0,
        "Most tokens of a sequence, prompt and output together, the same on every service (0: what the"
        " model's config.json says; of a longrope model what its short factors are for).",
        number(0, POSITIONS_MAX),
    )
    drain_timeout_ms: int = setting(
        30_000, "After the stop signal, longest wait for requests that started.", DURATION_MS
    )
    log_level: str = setting("info", "Least severe log lines to write.", LOG_LEVEL)
    log_format: str = setting("text", "How log lines are written.", LOG_FORMAT)
    otlp_endpoint: str = setting(
        "",
        "Collector that traces go to, by OTLP over gRPC, such as http://collector:4317 (not given: what"
        " OTEL_EXPORTER_OTLP_ENDPOINT says; neither: no traces).",
        COLLECTOR,
    )
    trace_sample: float = setting(
        1.0, "Share of requests that are traced, of those whose caller does not say whether to.", SHARE
    )

    tls_cert: str = setting(
        "", "Certificate (PEM) that this process shows over gRPC; with --tls-key and --tls-ca.", TEXT
    )
    tls_key: str = setting("", "Private key (PEM) of --tls-cert.", TEXT)
    tls_ca: str = setting(
        "",
        "Authority (PEM) whose certificates are believed over gRPC; then none is served without one.",
        TEXT,
    )
    run_token: str = setting(
        "",
        "Token that the parts of a stack show each other over gRPC where they show no certificates: a call"
        " without it is refused. `baton serve` draws one (not given elsewhere: none is asked for).",
        RUN_TOKEN,
        secret=True,
    )

    @property
    def tls(self) -> TlsFiles | None:
        """Certificate files for gRPC, or None for plain connections. Raises SettingsError if only some are
        given."""
        return tls_files(self.tls_cert, self.tls_key, self.tls_ca)

    def __post_init__(self) -> None:
        """Raise SettingsError if settings contradict each other, and resolve defaults that depend on other
        settings."""
        tls_files(self.tls_cert, self.tls_key, self.tls_ca)
