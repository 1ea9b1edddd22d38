"""Which figures of a round are set side by side, and where does a round's summary have them?"""

from dataclasses import dataclass
from typing import Any, Final

Summary = dict[str, Any]
"""What `latencies.summarise` tells of one round."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of a round, by its place in the summary."""

    path: str
    title: str
    unit: str
    more_is_better: bool = False

    def of(self, told: Summary) -> float | None:
        """None if the round has no such figure: nothing was answered, or by no answer of two tokens."""
        value: Any = told
        for key in self.path.split("."):
            if key not in value:
                return None
            value = value[key]
        return float(value)


LATENCIES: Final = (
    Measure("ttft_ms.p50", "TTFT, median", "ms"),
    Measure("ttft_ms.p99", "TTFT, p99", "ms"),
    Measure("tpot_ms.p50", "TPOT, median", "ms"),
    Measure("tpot_ms.p99", "TPOT, p99", "ms"),
    Measure("itl_ms.chunk.p50", "ITL, median", "ms"),
    Measure("itl_ms.chunk.p99", "ITL, p99", "ms"),
    Measure("itl_ms.chunk.max", "ITL, max", "ms"),
)
OUTPUT: Final = Measure("output_tokens_per_s", "output", "tokens/s", more_is_better=True)
GOODPUT: Final = Measure("goodput.requests_per_s", "goodput", "requests/s", more_is_better=True)
"""Of loads that state an objective."""

MEASURES: Final = (*LATENCIES, OUTPUT, GOODPUT)
