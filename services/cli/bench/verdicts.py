"""What came out of a comparison: medians, ratios, and which wishes were met?"""

import statistics
from collections.abc import Sequence
from typing import Any

from baton.cli.bench.comparison import Comparison
from baton.cli.bench.latencies import medians
from baton.cli.bench.measures import Measure, Summary
from baton.cli.bench.rounds import Measured


def judged(comparison: Comparison, measured: Measured) -> dict[str, Any]:
    """The numbers of the JSON file: by level, each system's medians and the first one's ratios."""
    first, *others = (each.name for each in comparison.systems)
    told = []
    for level in comparison.levels:
        rounds = {name: measured[name][level] for name in (first, *others)}
        told.append(
            {
                **level.described(),
                "medians": {name: medians(each) for name, each in rounds.items()},
                "counted": {name: _counted(each) for name, each in rounds.items()},
                "ratios": {
                    name: {
                        each.path: _ratio(each, rounds[first], rounds[name]) for each in comparison.measures
                    }
                    for name in others
                },
                "rounds": rounds,
            }
        )
    return {"levels": told, "wanted": _wishes(comparison, measured)}


def _counted(rounds: Sequence[Summary]) -> dict[str, int]:
    """What became of all requests: a median would not tell the ones that failed in few rounds."""
    return {
        told: sum(each[name] for each in rounds)
        for told, name in (("answered", "requests"), ("refused", "refused"), ("failed", "failed"))
    }


def _ratio(measure: Measure, ours: Sequence[Summary], theirs: Sequence[Summary]) -> dict[str, float]:
    """Of the medians; beside it the least and the greatest of single rounds."""
    pairs = [(measure.of(a), measure.of(b)) for a, b in zip(ours, theirs, strict=True)]
    single = [a / b for a, b in pairs if a is not None and b]
    mine, others = _median(measure, ours), _median(measure, theirs)
    if not single or mine is None or not others:
        return {}
    return {
        "ratio": round(mine / others, 4),
        "least": round(min(single), 4),
        "greatest": round(max(single), 4),
    }


def _median(measure: Measure, rounds: Sequence[Summary]) -> float | None:
    """None if no round has it."""
    values = [value for each in rounds if (value := measure.of(each)) is not None]
    return statistics.median(values) if values else None


def _wishes(comparison: Comparison, measured: Measured) -> list[dict[str, Any]]:
    measures = {each.path: each for each in comparison.measures}
    first = comparison.systems[0].name
    told = []
    for wish in comparison.wanted:
        for level in filter(wish.of, comparison.levels):
            measure, theirs = measures[wish.measure], measured[wish.against][level]
            ours = measured[first][level]
            mine, others = _median(measure, ours), _median(measure, theirs)
            limit = {"at_most": wish.at_most, "at_least": wish.at_least}
            told.append(
                {
                    "against": wish.against,
                    "measure": wish.measure,
                    **level.described(),
                    **{key: value for key, value in limit.items() if value is not None},
                    "ratio": _ratio(measure, ours, theirs).get("ratio"),
                    "met": mine is not None and others is not None and wish.met(mine, others),
                }
            )
    return told
