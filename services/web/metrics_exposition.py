"""Text formats of `/metrics`: Prometheus' own, and OpenMetrics for scrapers that ask for it."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as open_metrics

OPEN_METRICS: Final = "application/openmetrics-text"


def choose_exposition(accept: str) -> tuple[Callable[[Any], bytes], str]:
    """Return a function that writes a registry as text, and the text's media type. `accept`: the scraper's
    `Accept` header.

    prometheus_client's `choose_encoder` replaces the colon of names such as vLLM's by an underscore in
    OpenMetrics, although every scraper can read it.
    """
    if OPEN_METRICS not in accept:
        return choose_encoder(accept)
    write = partial(open_metrics.generate_latest, escaping="allow-utf-8")
    return write, open_metrics.CONTENT_TYPE_LATEST
