"""Pairwise covers: a few cases that hold every pair of values which any of all cases holds.

Most faults need one value, or two together. A cover has each such pair at a fraction of the time of the full
product. The full product is for longer runs, such as `make verify-groups` for rank groups."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark import ParameterSet

Case = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def every(
    dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """The product of the dimensions' values, but for the cases that are not `allowed`."""
    cases = (dict(zip(dimensions, values, strict=True)) for values in product(*dimensions.values()))
    return [case for case in cases if allowed(case)]


def pairs_of(case: Case) -> Iterator[Pair]:
    """Return all pairs of values of different dimensions in the case."""
    return map(frozenset, combinations(case.items(), 2))


def cover(cases: Iterable[Case], cost: Callable[[Case], float] = lambda case: 1.0) -> list[Case]:
    """Return a few of `cases` that hold every pair which any of them holds. The next one is always the one
    with the most new pairs for its `cost`, and the first of equals. So the same cases give the same cover."""
    holding = [(case, frozenset(pairs_of(case))) for case in cases]
    missing = {pair for _, pairs in holding for pair in pairs}
    chosen: list[Case] = []
    while missing:
        case, pairs = max(holding, key=lambda each: len(each[1] & missing) / cost(each[0]))
        chosen.append(case)
        missing -= pairs
    return chosen


def parameters(
    cases: Sequence[Case],
    name: Callable[[Case], str],
    left_out: pytest.MarkDecorator,
    cost: Callable[[Case], float] = lambda case: 1.0,
) -> list[ParameterSet]:
    """Return all cases for `parametrize`. Those that are not in their cover have the mark `left_out`."""
    chosen = cover(cases, cost)
    return [pytest.param(case, id=name(case), marks=() if case in chosen else left_out) for case in cases]
