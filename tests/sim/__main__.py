"""Run seeds: `python -m tests.sim [--seeds A:B] [--rooms N] [--jobs N] [--json]`, or one with `--trace`."""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from tests.sim.profile import NAMES
from tests.sim.run import ROOMS, Report, run


def summary(reports: Iterable[Report], seeds: tuple[int, int], started: float) -> dict[str, Any]:
    """Return the summary of many seeds. Reports each seed that broke something as soon as it ends."""
    faults: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    deeds: Counter[str] = Counter()
    broken: list[dict[str, Any]] = []
    rooms = runs = violations = 0
    for report in reports:
        runs += 1
        rooms += report.rooms
        violations += len(report.violations)
        faults += report.faults
        outcomes += report.outcomes
        deeds += report.deeds
        broken += [
            {"seed": report.seed, "invariant": each.invariant, "text": each.text}
            for each in report.violations
        ]
        if report.violations:
            sys.stderr.write(tell(report) + "\n")
    return {
        "rooms": rooms,
        "violations": violations,
        "runs": runs,
        "seeds": list(seeds),
        "faults": dict(sorted(faults.items())),
        "outcomes": dict(sorted(outcomes.items())),
        "deeds": dict(sorted(deeds.items())),
        "seconds": round(time.monotonic() - started, 1),
        "broken": broken,
    }


def tell(report: Report, *, timeline: bool = False) -> str:
    took = f"{report.rooms} rooms, {report.virtual_s:.0f} s of its time in {report.seconds:.1f} s"
    what = f"{dict(report.outcomes)}, {dict(report.deeds)}, {dict(report.faults)}, digest {report.digest}"
    lines = [f"seed {report.seed} ({report.shape.name}): {took}, {what}"]
    for violation in report.violations:
        lines += [f"  {violation.invariant}: {violation.text}"]
    if report.violations or timeline:
        lines += list(report.violations[0].timeline if report.violations else report.timeline)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.sim")
    parser.add_argument("--seed", type=int, help="one seed, told in full")
    parser.add_argument("--seeds", default="0:100", help="first:last + 1")
    parser.add_argument("--rooms", type=int, default=ROOMS, help="requests of a run")
    parser.add_argument("--profile", choices=NAMES, help="instead of the seeds' own")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trace", action="store_true", help="with --seed: the last events, too")
    chosen = parser.parse_args()
    if chosen.seed is not None:
        report = run(chosen.seed, chosen.rooms, chosen.profile, tidy=False)
        sys.stdout.write(tell(report, timeline=chosen.trace) + "\n")
        sys.stdout.flush()
        # Of processes that died in it coroutines are left, which a usual end would collect, one by one.
        os._exit(1 if report.violations else 0)
    first, last = map(int, chosen.seeds.split(":"))
    started = time.monotonic()
    total = summary(
        reports(range(first, last), chosen.rooms, chosen.profile, chosen.jobs), (first, last), started
    )
    sys.stdout.write(json.dumps(total if chosen.json else {**total, "broken": len(total["broken"])}) + "\n")
    return 1 if total["violations"] else 0


def reports(seeds: Iterable[int], rooms: int, name: str | None, jobs: int) -> Iterator[Report]:
    """Run all seeds, `jobs` at a time, and yield their reports in the order of the seeds."""
    play = partial(run, rooms=rooms, name=name)
    if jobs == 1:
        yield from map(play, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(play, seeds)


if __name__ == "__main__":
    sys.exit(main())
