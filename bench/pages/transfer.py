"""The command `transfer`: pages pushed to another process, beside bare NIXL writes and memcpy."""

import json
import statistics
from collections.abc import Mapping
from typing import Annotated, Final

import typer

from bench.report import AsJson, Runs

ANSWER_S: Final = 60.0
GIGA: Final = 1e9


def transfer(
    runs: Runs = 15,
    window: Annotated[int, typer.Option(min=1, max=64, help="MiB a write.")] = 8,
    chunk: Annotated[int, typer.Option(min=0, max=32, help="MiB a chunk; 0: of 1, 4 and 16.")] = 0,
    device: Annotated[str, typer.Option(help="Whose memory: cpu or cuda[:N].")] = "cpu",
    _: AsJson = True,
) -> None:
    """Pages as prefill pushes them, beside one bare NIXL write of as many bytes, and memcpy."""
    from bench.pages.device_memory import numbered
    from bench.pages.transfer_pair import AS_PUSHED, MIB, cases, measure

    place = numbered(device)
    measured = measure(cases([chunk] if chunk else [1, 4, 16]), runs, window * MIB, ANSWER_S, place)
    if measured is None:
        typer.echo(f"baton: error: the other process gave no answer within {ANSWER_S:g} s", err=True)
        raise typer.Exit(1)
    told: list[dict[str, object]] = []
    for each in measured:
        medians, firsts = _medians(each.next), _medians(each.first)
        told.append(
            {
                **each.case.facts,
                "bytes": each.length,
                "gigabytes_s": {
                    key: round(each.length / value / GIGA, 2) for key, value in sorted(medians.items())
                },
                "ratio": _ratio(medians),
                "ratio_as_pushed": round(medians[AS_PUSHED] / medians["push"], 3),
                "ratio_of_the_first": _ratio(firsts),
            }
        )
    body = {
        "benchmark": "transfer",
        "runs": runs,
        "window_bytes": window * MIB,
        "device": place,
        "cases": told,
        "ratio": min(each["ratio"] for each in told if each["same_shape"]),  # type: ignore[type-var]
        "ratio_of": ["push", "the best of nixl"],
    }
    print(json.dumps(body))


def _medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {key: statistics.median(values) for key, values in seconds.items()}


def _ratio(medians: Mapping[str, float]) -> float:
    """Return the push's time divided by that of the fastest bare NIXL write."""
    bare = min(value for key, value in medians.items() if key.startswith("nixl"))
    return round(bare / medians["push"], 3)
