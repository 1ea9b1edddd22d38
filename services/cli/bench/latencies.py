"""What is told about a round of requests, and about several rounds?

    ttft        the request was due → its first chunk
    tpot        (last chunk - first chunk) / (output tokens - 1), per request
    itl.chunk   the gaps between the chunks of a request, over all requests
    itl.token   the same gaps shared out among the tokens that came in one chunk
    goodput     requests a second that met the objective, whole

Percentiles are nearest ranks: p99 of fewer than 100 values is their maximum, p50 of two the lesser.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.cli.bench.answers import Answer
from baton.cli.bench.load import LoadOutcome


@dataclass(frozen=True, slots=True)
class Objective:
    """What an answer has to keep to be good: each in milliseconds, None for no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    gap_ms: float | None = None
    """The longest silence between chunks."""

    @property
    def asked(self) -> bool:
        return self != Objective()

    def met(self, answer: Answer) -> bool:
        def within(value_s: float | None, limit_ms: float | None) -> bool:
            return limit_ms is None or value_s is None or value_s * 1000 <= limit_ms

        longest = max(answer.chunk_gaps_s, default=None)
        return (
            within(answer.ttft_s, self.ttft_ms)
            and within(answer.tpot_s, self.tpot_ms)
            and within(longest, self.gap_ms)
        )

    def described(self) -> dict[str, float]:
        limits = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "itl_ms": self.gap_ms}
        return {name: limit for name, limit in limits.items() if limit is not None}


def summarise(outcome: LoadOutcome, objective: Objective) -> dict[str, Any]:
    """One round. Has no times if nothing was answered."""
    answers, wall_s = outcome.answers, outcome.wall_s
    told: dict[str, Any] = {
        "requests": len(answers),
        "failed": len(outcome.failures),
        "refused": outcome.refused,
        "wall_s": round(wall_s, 3),
        "client_cpu_share": round(outcome.client_cpu_s / wall_s, 4),
    }
    if not answers:
        return told
    output = sum(each.output_tokens for each in answers)
    prompt = sum(each.prompt_tokens for each in answers)
    told |= {
        "ttft_ms": spread([each.ttft_s for each in answers]),
        "tpot_ms": spread([tpot for each in answers if (tpot := each.tpot_s) is not None]),
        "itl_ms": {
            "chunk": spread([gap for each in answers for gap in each.chunk_gaps_s]),
            "token": spread([gap for each in answers for gap in each.token_gaps_s]),
        },
        "end_to_end_ms": spread([each.ended - each.due for each in answers]),
        "late_ms": spread([each.sent - each.due for each in answers]),
        "output_tokens_per_s": round(output / wall_s, 2),
        "total_tokens_per_s": round((output + prompt) / wall_s, 2),
        "requests_per_s": round(len(answers) / wall_s, 4),
        "prompt_tokens": prompt,
        "cached_tokens": sum(each.cached_tokens for each in answers),
        "output_tokens": output,
        "chunks": sum(len(each.chunks) for each in answers),
    }
    if objective.asked:
        good = sum(objective.met(each) for each in answers)
        share = good / (len(answers) + len(outcome.failures))
        told["goodput"] = {"requests_per_s": round(good / wall_s, 4), "share": round(share, 4)}
    return told


def medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Number by number, over the rounds that have it; what is no number is not told."""
    told: dict[str, Any] = {}
    for key in dict.fromkeys(key for each in rounds for key in each):
        values = [
            each[key]
            for each in rounds
            if isinstance(each.get(key), int | float | dict) and not isinstance(each[key], bool)
        ]
        if values:
            nested = isinstance(values[0], dict)
            told[key] = medians(values) if nested else round(statistics.median(values), 4)
    return told


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds; empty of nothing."""
    if not seconds:
        return {}
    ordered = sorted(seconds)

    def rank(share: float) -> float:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)] * 1000, 3)

    return {
        "p50": rank(0.5),
        "p90": rank(0.9),
        "p99": rank(0.99),
        "max": rank(1.0),
    }
