"""Checks that every mutant is caught by the invariant that it was made for. Usage: `python -m tests.mutants
[--only NAME] [--jobs N] [--json]`. The exit status is 1 if one is not caught, or if a check fails on the
unchanged source."""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

from tests.mutants.lanes import Outcome, controls, errands, judge
from tests.mutants.mutant import Mutant
from tests.mutants.tables import MUTANTS

KINDS: Final = ("story", "model", "sim", "suite")


def line(outcome: Outcome, mutant: Mutant | None) -> dict[str, Any]:
    """Return the printed fields of one mutant's outcome."""
    found = outcome.found
    said: dict[str, Any] = {"name": outcome.name}
    if mutant is not None:
        said |= {"wanted": mutant.invariant, "caught": outcome.catches(mutant)}
    if found is not None:
        said |= {"found": found.invariant, "by": f"{found.by} {found.check}"}
    if outcome.problem:
        said |= {"problem": outcome.problem}
    if mutant is not None and mutant.report is not None:
        said |= {"reported": f"{mutant.report.thread}: {mutant.report.tells}"}
    return said | {"seconds": outcome.seconds}


def summary(outcomes: Iterable[Outcome], mutants: Iterable[Mutant]) -> dict[str, Any]:
    """Return one JSON object for all outcomes."""
    known = {mutant.name: mutant for mutant in mutants}
    caught, missed, untrue = {}, [], []
    for each in outcomes:
        mutant = known.get(each.name)
        if mutant is None:
            untrue += [] if each.clean else [line(each, None)]
        elif each.catches(mutant):
            caught[each.name] = each
        else:
            missed.append(line(each, mutant))
    field = {
        name: asdict(mutant.report)
        for name, mutant in known.items()
        if name in caught and mutant.report is not None
    }
    by = Counter(each.found.by for each in caught.values() if each.found is not None)
    return {
        "total": len(known),
        "caught": len(caught),
        "by": {name: mutant.invariant for name, mutant in known.items() if name in caught},
        "kinds": {kind: by[kind] for kind in KINDS},
        "field": field,
        "missed": missed,
        "control": untrue,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", action="append", choices=[m.name for m in MUTANTS], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--json", action="store_true", help="one object, without traces")
    args = parser.parse_args()
    started = time.monotonic()
    chosen = [mutant for mutant in MUTANTS if not args.only or mutant.name in args.only]
    known = {mutant.name: mutant for mutant in chosen}
    outcomes = []
    for each in judge([*errands(chosen), *controls(chosen)], args.jobs):
        outcomes.append(each)
        if not args.json:
            sys.stdout.write(json.dumps(line(each, known.get(each.name))) + "\n")
            if args.only and each.found is not None:
                sys.stdout.write(f"\n{each.found.trace}\n\n")
            sys.stdout.flush()
    whole = summary(outcomes, chosen) | {"seconds": round(time.monotonic() - started, 1)}
    sys.stdout.write(json.dumps(whole) + "\n")
    return 0 if whole["caught"] == whole["total"] and not whole["control"] else 1


if __name__ == "__main__":
    sys.exit(main())
