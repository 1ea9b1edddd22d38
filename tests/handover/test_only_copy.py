"""Is what a move does written once?"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parents[1]
MOVES: Final = frozenset({"take", "expose", "commit", "keep", "quarantine", "give_back", "distrust"})
"""Of a room's memory: `services.pages.holdings` has them, and `services.handover` alone calls them."""


def _moves(source: str) -> Iterator[str]:
    """Calls of these in a module."""
    for node in ast.walk(ast.parse(source)) if "holdings" in source else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MOVES:
            whose = ast.unparse(node.func.value)
            if "holdings" in whose:
                yield f"line {node.lineno}: {whose}.{node.func.attr}"


def test_no_test_moves_memory_by_itself_but_those_of_the_holdings() -> None:
    modules = [each for each in TESTS.rglob("*.py") if each.parent.name != "pages"]
    assert {str(each): found for each in modules if (found := [*_moves(each.read_text())])} == {}


def test_a_module_that_does_is_found() -> None:
    assert [*_moves("self._holdings.give_back(room)")] == ["line 1: self._holdings.give_back"]
