"""What does a server's /metrics count, over all labels?"""

from collections.abc import Mapping
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from baton.cli.asking import trusted
from baton.cli.bench.probe import NotMeasurable
from baton.cli.bench.stream_client import ServerAddress

METRICS_S: Final = 30.0


def counts(server: ServerAddress, watched: Mapping[str, str]) -> dict[str, float]:
    """The sums of those of its series that are there, by what each is to be called. Raises NotMeasurable."""
    try:
        reply = httpx.get(
            f"{server.url}/metrics",
            headers=dict(server.headers),
            timeout=METRICS_S,
            trust_env=False,
            verify=trusted(),
        )
        reply.raise_for_status()
        families = list(text_string_to_metric_families(reply.text))
    except (httpx.HTTPError, ValueError) as error:
        raise NotMeasurable(f"{server.url}/metrics does not tell what it counts: {error}") from None
    told: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        if (name := watched.get(sample.name)) is not None:
            told[name] = told.get(name, 0.0) + sample.value
    return told


def counted_since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """What each has gained."""
    return {name: round(value - before.get(name, 0.0)) for name, value in after.items()}
