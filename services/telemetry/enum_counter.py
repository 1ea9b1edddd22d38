"""Prometheus counters with one label, whose values are the members of an enumeration."""

from collections.abc import Iterable
from enum import Enum
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter

E = TypeVar("E", bound=Enum)


def enum_counter(
    name: str, text: str, label: str, members: Iterable[E], registry: CollectorRegistry
) -> dict[E, Counter]:
    """Return a Prometheus counter for each enumeration member, as one metric with `label`.

    All series exist from the start with value 0, so that none appears late.
    """
    family = Counter(name, text, [label], registry=registry)
    return {each: family.labels(each.value) for each in members}
