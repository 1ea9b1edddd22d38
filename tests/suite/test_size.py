"""Tests of the size of files and constructors, and that the product uses all of its modules."""

import ast
from collections.abc import Iterator
from typing import Final

from tests.suite.test_imports import imported, sources

LINES_MAX: Final = 500
LONGER: Final[dict[str, str]] = {}
"""Files that are longer, and why."""

PARTS_MAX: Final = 12
MORE_PARTS: Final = {
    "BootstrapSettings": "a setting each",
    "WorkerSettings": "a setting each",
    "ServeSettings": "a setting each",
    "RequestTimeline": "what a page shows, a record",
    "HttpExchange": "what is left of a request, a record",
    "Meaning": "what a request asks for, a record",
    "WorkerFacts": "what a worker registers, a record",
    "RoomEntry": "what the registry knows of a room, a record",
    "Request": "what is asked of a room, a record",
    "Room": "what a rank knows of a room, a record",
}
"""Classes that are made of more, and why."""

PROGRAMS: Final = {
    "baton.engine.gguf.convert": "a process of its own, for its memory",
    "baton.engine.engine_startup": "imported by name, from the table of engines",
    "baton.vllm.engine_startup": "imported by name, from the table of engines",
    "baton.vllm.preloading": "imported by name, from the table of engines",
    "baton.cli.forked_commands": "the process that workers are forked from",
}
"""Modules that no other imports, and what they are for. What tests alone need is in `baton.testing`."""


def constructors(source: str) -> Iterator[tuple[str, int]]:
    """Yield each class with a constructor, and the number of its parameters."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        written = [
            each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"
        ]
        if written:
            arguments = written[0].args
            yield node.name, len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1
        elif any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            yield node.name, sum(_is_given(each) for each in fields)


def _is_given(field: ast.AnnAssign) -> bool:
    value = "" if field.value is None else ast.unparse(field.value)
    return "ClassVar" not in ast.unparse(field.annotation) and "init=False" not in value


def test_a_file_is_read_in_one_sitting() -> None:
    longer = {name for name, source in sources().items() if len(source.splitlines()) > LINES_MAX}
    assert longer == LONGER.keys()


def test_an_object_is_made_of_few_parts() -> None:
    more = {
        name for source in sources().values() for name, parts in constructors(source) if parts > PARTS_MAX
    }
    assert more == MORE_PARTS.keys()


def test_what_tests_alone_need_is_no_part_of_the_product() -> None:
    modules = sources()
    packages = {name for name in modules if any(each.startswith(f"{name}.") for each in modules)}
    used = {other for name, source in modules.items() for other in imported(source) - {name}}
    product = {name for name in modules if not name.startswith("baton.testing")}
    assert product - packages - used == PROGRAMS.keys()
