"""Command that explores scopes of the model.

`python -m tests.model --scope NAME [--scope …]`; without a name, every quick one; `--verify` for those of
`make verify`; `--all` for every one. One line of JSON a scope (`--verify --json`: one object of all of
them); exit status 1 if a law is broken or a scope was not explored as far as it states.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from typing import Any

from tests.model.scopes import SCOPES, Scope
from tests.model.search import Found, Search


def summary(found: Found) -> dict[str, Any]:
    return {
        "states": found.states,
        "transitions": found.transitions,
        "depth": found.depth,
        "violations": len(found.violations),
        "broken": [{"law": each.law.value, "text": each.text} for each in found.violations],
        "complete": found.complete,
        "seconds": found.seconds,
    }


def chosen(args: argparse.Namespace) -> Iterable[Scope]:
    if args.scope:
        return [SCOPES[name] for name in args.scope]
    if args.all:
        return SCOPES.values()
    return [scope for scope in SCOPES.values() if scope.quick or (args.verify and not scope.long)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--scope", action="append", choices=SCOPES, metavar="NAME", help=", ".join(SCOPES))
    parser.add_argument("--verify", action="store_true", help="the quick scopes, and large ones that fit")
    parser.add_argument("--all", action="store_true", help="every scope")
    parser.add_argument("--states", type=int, help="stop after so many states were explored")
    parser.add_argument("--json", action="store_true", help="no stories")
    args = parser.parse_args()
    told: dict[str, Any] = {}
    sound = True
    for scope in chosen(args):
        found = Search(scope).run(states_max=args.states)
        sound = sound and not found.violations and (found.complete or scope.depth is not None)
        told[scope.name] = summary(found)
        line = json.dumps({"scope": scope.name} | told[scope.name])
        if args.verify and args.json:
            sys.stderr.write(f"model: {line}\n")
        else:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        for violation in () if args.json else found.violations:
            sys.stdout.write(f"\n{violation.story}\n\n")
    if args.verify and args.json:
        sys.stdout.write(json.dumps(told) + "\n")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
