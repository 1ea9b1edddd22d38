"""What can be set on every service?"""

from dataclasses import dataclass

from services.runtime.setting_kinds import DURATION_MS, HOST, choices, matching
from services.runtime.settings import setting

LOG_LEVEL = choices("debug", "info", "warning", "error")
LOG_FORMAT = choices("text", "json")
ADVERTISE = matching(r"[A-Za-z0-9._:%-]*", "HOST", "an address or host name without a port")


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Common to bootstrap, prefill and decode."""

    host: str = setting("127.0.0.1", "Address to listen on.", HOST)
    advertise: str = setting(
        "", "Address under which other processes reach this one (not given: the listen address).", ADVERTISE
    )
    drain_timeout_ms: int = setting(
        30_000, "After the stop signal, longest wait for requests that started.", DURATION_MS
    )
    log_level: str = setting("info", "Least severe log lines to write.", LOG_LEVEL)
    log_format: str = setting("text", "How log lines are written.", LOG_FORMAT)

    def __post_init__(self) -> None:
        """Resolve the defaults that depend on other settings: a reader only ever sees real values."""
        if not self.advertise:
            object.__setattr__(self, "advertise", self.host)
