"""Text formats of `/metrics`: Prometheus' own, and OpenMetrics for scrapers that ask for it."""

from collections.abc import Callable
from typing import Any, Final

from prometheus_client.exposition import choose_encoder

OPEN_METRICS: Final = "application/openmetrics-text"
OPEN_METRICS_AS_IS: Final = f"{OPEN_METRICS}; version=1.0.0; escaping=allow-utf-8"
"""`Accept` header for names that are not changed."""


def choose_exposition(accept: str) -> tuple[Callable[[Any], bytes], str]:
    """Return a function that writes a registry as text, and the text's media type. `accept`: the scraper's
    `Accept` header.

    By default prometheus_client replaces the colon of names such as vLLM's by an underscore in OpenMetrics,
    although every scraper can read it.
    """
    return choose_encoder(OPEN_METRICS_AS_IS if OPEN_METRICS in accept else accept)
