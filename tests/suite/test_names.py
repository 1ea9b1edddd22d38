"""Tests that no two classes have the same name.

A name in a search or a trace then leads to one place.
"""

import ast
from collections import defaultdict
from pathlib import Path
from typing import Final

SERVICES: Final = Path(__file__).parents[2] / "services"
GENERATED: Final = SERVICES / "wire" / "baton"


def classes() -> dict[str, list[str]]:
    """Return the place of each class of a module, by its name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SERVICES.rglob("*.py")):
        if path.is_relative_to(GENERATED):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(SERVICES)}:{node.lineno}")
    return found


def test_no_two_classes_have_one_name() -> None:
    assert {name: places for name, places in classes().items() if len(places) > 1} == {}
