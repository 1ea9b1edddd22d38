"""Run a tiny model of every type, or of these: python -m tests.models [TYPE …] [--json | --rewrite]"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict

from tests.models.comparison import Outcome
from tests.models.page import PAGE, rendered
from tests.models.sweep import PROCESSES, all_types, sweep


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("types", nargs="*", help="without, all of them")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--json", action="store_true", help="one object, by type")
    parser.add_argument("--rewrite", action="store_true", help=f"write {PAGE.name} anew")
    args = parser.parse_args()
    if args.types and args.rewrite:
        parser.error("--rewrite takes all types")
    outcomes: dict[str, Outcome] = {}
    for kind, outcome in sweep(args.types or all_types(), args.processes):
        outcomes[kind] = outcome
        if not args.json:
            words = " ".join((outcome.words, *outcome.sights))
            sys.stdout.write(f"{kind:28} {outcome.verdict.value:9} {words}\n")
            sys.stdout.flush()
    counts = Counter(each.verdict.value for each in outcomes.values())
    if args.json:
        sys.stdout.write(json.dumps({kind: asdict(each) for kind, each in outcomes.items()}) + "\n")
    else:
        sys.stdout.write(f"{dict(counts)}\n")
    if args.rewrite:
        PAGE.write_text(rendered(outcomes), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
