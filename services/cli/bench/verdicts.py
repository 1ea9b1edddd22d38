"""What came out of a comparison: medians, ratios, and which wishes were met?"""

import statistics
from dataclasses import dataclass
from typing import Any, Final

from services.cli.bench.comparison import Comparison
from services.cli.bench.latencies import medians
from services.cli.bench.rounds import Measured


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of a round, by its place in the summary."""

    path: str
    title: str
    unit: str
    more_is_better: bool = False

    def of(self, told: dict[str, Any]) -> float:
        """Raises KeyError if the round has no such figure."""
        value: Any = told
        for key in self.path.split("."):
            value = value[key]
        return float(value)


MEASURES: Final = (
    Measure("ttft_ms.p50", "TTFT, median", "ms"),
    Measure("tpot_ms.p50", "TPOT, median", "ms"),
    Measure("itl_ms.chunk.p99", "ITL, p99", "ms"),
    Measure("itl_ms.chunk.max", "ITL, max", "ms"),
    Measure("output_tokens_per_s", "output", "tokens/s", more_is_better=True),
)


def judged(comparison: Comparison, measured: Measured) -> dict[str, Any]:
    """The numbers of the JSON file: by concurrency, each system's medians and the first one's ratios."""
    first, *others = (each.name for each in comparison.systems)
    told = []
    for concurrency in comparison.load.concurrency:
        rounds = {name: measured[name][concurrency] for name in (first, *others)}
        told.append(
            {
                "concurrency": concurrency,
                "medians": {name: medians([_numbers(each) for each in rounds[name]]) for name in rounds},
                "ratios": {
                    name: {each.path: _ratio(each, rounds[first], rounds[name]) for each in MEASURES}
                    for name in others
                },
                "rounds": rounds,
            }
        )
    return {"levels": told, "wanted": _wishes(comparison, told)}


def _ratio(measure: Measure, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float]:
    """Of the medians; beside it the least and the greatest of single rounds."""
    pairs = [(measure.of(a), measure.of(b)) for a, b in zip(ours, theirs, strict=True)]
    single = [a / b for a, b in pairs if b > 0]
    if not single:
        return {}
    whole = statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)
    return {"ratio": round(whole, 4), "least": round(min(single), 4), "greatest": round(max(single), 4)}


def _wishes(comparison: Comparison, levels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    told = []
    for wish in comparison.wanted:
        for level in levels:
            if level["concurrency"] not in wish.concurrency:
                continue
            ratio = level["ratios"][wish.against].get(wish.measure, {}).get("ratio")
            limit = {"at_most": wish.at_most, "at_least": wish.at_least}
            told.append(
                {
                    "against": wish.against,
                    "measure": wish.measure,
                    "concurrency": level["concurrency"],
                    **{key: value for key, value in limit.items() if value is not None},
                    "ratio": ratio,
                    "met": ratio is not None and wish.met(ratio),
                }
            )
    return told


def _numbers(told: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in told.items() if key != "failures"}
