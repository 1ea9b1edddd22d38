"""Prometheus histograms that are updated from one event loop only, and therefore cheap to update."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class LoopHistogram(Collector):
    """A Prometheus histogram that is updated from one event loop.

    An observation costs a binary search and two additions. The client library's objects are built only when
    the metrics are scraped.
    """

    def __init__(
        self, name: str, text: str, buckets_s: Sequence[float], registry: CollectorRegistry | None = None
    ) -> None:
        """Make an empty histogram.

        `buckets_s`: upper bounds of the buckets, seconds, ascending. `registry`: the registry that scrapes
        it, or None if its owner collects it.
        """
        self._name = name
        self._text = text
        self._bounds = tuple(buckets_s)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        if registry is not None:
            registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text)
        self.add_to(family)
        yield family

    def add_to(self, family: HistogramMetricFamily, *labels: str) -> None:
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        counts = [float(count) for count in accumulate(self._counts)]
        family.add_metric(labels, list(zip(names, counts, strict=True)), self._sum)


class LabelledHistogram(Collector):
    """A Prometheus histogram with one label: one histogram for each of the label's values."""

    def __init__(
        self,
        name: str,
        text: str,
        buckets_s: Sequence[float],
        label: str,
        values: Iterable[str],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._label = label
        self._tallies = {value: LoopHistogram(name, text, buckets_s) for value in values}
        registry.register(self)

    def of(self, label: str) -> LoopHistogram:
        """Return the histogram for one value of the label, made at its first use."""
        return self._tallies[label]

    def observe(self, label: str, value: float) -> None:
        self._tallies[label].observe(value)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        for label, tally in self._tallies.items():
            tally.add_to(family, label)
        yield family
