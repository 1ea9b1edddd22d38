"""Sums of a bootstrap's counters, from its /metrics."""

from collections.abc import Mapping
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from baton.cli.load_benchmark import NotMeasurable

METRICS_S: Final = 30.0


def counts(url: str, watched: Mapping[str, str]) -> dict[str, float]:
    """Return the sum over all labels of each watched series, by its short name. Raises NotMeasurable."""
    try:
        reply = httpx.get(f"{url}/metrics", timeout=METRICS_S, trust_env=False)
        reply.raise_for_status()
        families = list(text_string_to_metric_families(reply.text))
    except (httpx.HTTPError, ValueError) as error:
        raise NotMeasurable(f"{url}/metrics cannot be read: {error}") from None
    sums: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        if (name := watched.get(sample.name)) is not None:
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def increases(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    return {name: round(value - before.get(name, 0.0)) for name, value in after.items()}
