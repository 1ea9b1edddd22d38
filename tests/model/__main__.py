"""Which scopes hold? `python -m tests.model --scope NAME [--scope …] [--json]`; without a name, every quick
one; `--all` for every one. One line of JSON a scope; exit status 1 if a law is broken."""

import argparse
import json
import sys
from typing import Any

from tests.model.scopes import SCOPES
from tests.model.search import Found, Search


def summary(found: Found) -> dict[str, Any]:
    return {
        "scope": found.scope.name,
        "states": found.states,
        "transitions": found.transitions,
        "depth": found.depth,
        "complete": found.complete,
        "product_runs": found.product_runs,
        "seconds": found.seconds,
        "violations": [{"law": each.law.value, "text": each.text} for each in found.violations],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--scope", action="append", choices=SCOPES, metavar="NAME", help=", ".join(SCOPES))
    parser.add_argument("--all", action="store_true", help="the large scopes too")
    parser.add_argument("--states", type=int, help="stop after so many states were explored")
    parser.add_argument("--json", action="store_true", help="no stories, one line of JSON a scope")
    args = parser.parse_args()
    names = args.scope or [name for name, scope in SCOPES.items() if scope.quick or args.all]
    sound = True
    for name in names:
        found = Search(SCOPES[name]).run(states_max=args.states)
        sys.stdout.write(json.dumps(summary(found)) + "\n")
        sys.stdout.flush()
        for violation in found.violations:
            sound = False
            if not args.json:
                sys.stdout.write(f"\n{violation.story}\n\n")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
