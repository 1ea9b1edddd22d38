"""Counts of HTTP connections that the server closed: unserved ones, and those closed at a limit."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter

OPEN_FILES: Final = "open_files"
NO_TLS: Final = "no_tls"
LIMIT: Final = "limit"


class ClosedConnections:
    """Prometheus counter of the HTTP connections that the server closed, by reason."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._hung_up = Counter(
            "baton_http_connections_hung_up",
            "HTTP connections that the server closed, by why: no more files can be opened (open_files), the"
            " client does not speak TLS (no_tls), or the connections or their bytes reached a limit (limit).",
            ["why"],
            registry=registry,
        )
        for why in (OPEN_FILES, NO_TLS, LIMIT):
            self._hung_up.labels(why)

    def count(self, why: str, times: int = 1) -> None:
        self._hung_up.labels(why).inc(times)
