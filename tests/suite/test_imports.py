"""Tests of the product's imports: no circles, and each name from the module that defines it."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
GENERATED: Final = ROOT / "services" / "wire" / "baton"
PROGRAM: Final = "baton.cli.main"
"""A forked process runs the whole program anew: that import leads to a beginning and closes no circle."""


def module_name(path: Path) -> str:
    """Return the name by which a file of the product or of the tests is imported."""
    top, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["baton" if top == "services" else top, *rest]).removesuffix(".__init__")


def sources() -> dict[str, str]:
    """Return each module's text, by its name."""
    return {
        module_name(path): path.read_text()
        for path in sorted((ROOT / "services").rglob("*.py"))
        if not path.is_relative_to(GENERATED)
    }


def imported(source: str) -> set[str]:
    """Return all modules that a source imports, also within functions and for types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                found |= {each.name for each in names}
            case ast.ImportFrom(module=str(module), names=names):
                found |= {module} | {f"{module}.{each.name}" for each in names}
            case _:
                pass
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = sources()
    others = modules.keys() - {PROGRAM}
    TopologicalSorter({name: imported(source) & others for name, source in modules.items()}).prepare()


def test_a_name_is_imported_from_the_module_that_defines_it() -> None:
    """The type checker refuses every other import, but where a module lists what it passes on."""
    assert [name for name, source in sources().items() if "__all__" in source] == []
