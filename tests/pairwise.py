"""Covers: a few cases that hold every value, or every pair of values, which any of all cases holds.

Most faults need one value, or two together. A cover has each of these at a fraction of the time of the full
product. The full product is for longer runs, such as `make verify-groups` for rank groups."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark import ParameterSet

Case = dict[str, Any]
Part = frozenset[tuple[str, Any]]
"""Values of a case, by their dimensions."""


def every(
    dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """The product of the dimensions' values, but for the cases that are not `allowed`."""
    cases = (dict(zip(dimensions, values, strict=True)) for values in product(*dimensions.values()))
    return [case for case in cases if allowed(case)]


def parts_of(case: Case, size: int = 2) -> Iterator[Part]:
    """Return each combination of `size` values of different dimensions in the case."""
    return map(frozenset, combinations(case.items(), size))


def cover(
    cases: Iterable[Case], cost: Callable[[Case], float] = lambda case: 1.0, *, size: int = 2
) -> list[Case]:
    """Return a few of `cases` that hold every combination of `size` values which any of them holds. The next
    one is always the one with the most new combinations for its `cost`, and the first of equals. So the same
    cases give the same cover."""
    holding = [(case, frozenset(parts_of(case, size))) for case in cases]
    missing = {part for _, parts in holding for part in parts}
    chosen: list[Case] = []
    while missing:
        case, parts = max(holding, key=lambda each: len(each[1] & missing) / cost(each[0]))
        chosen.append(case)
        missing -= parts
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
