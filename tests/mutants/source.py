"""Edits of Python source by qualified name and syntax tree: a move or a new layout changes none of them."""

import ast
import io
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
BODIES: Final = ("body", "orelse", "finalbody", "handlers", "cases")


class Drifted(Exception):
    """The source no longer contains what the mutant was made from. Bring the mutant up to date."""


@dataclass(frozen=True, slots=True)
class Edit:
    place: str
    """Qualified name of a function, class or constant, or of a module. Packages may precede it."""
    before: str
    """An expression, consecutive statements, or a compound statement's header, once in the place."""
    after: str


@dataclass(frozen=True, slots=True)
class Span:
    start: int
    end: int
    """Offsets in the encoded file."""
    text: str
    """Replacement."""


class Source:
    """One parsed file, with its definitions by qualified name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path.read_bytes()
        self.tree = parse(self.data.decode())
        self.definitions: dict[tuple[str, ...], list[ast.AST]] = {(): [self.tree]}
        self._define(self.tree, ())
        self._lines = [0]
        for line in self.data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def _define(self, node: ast.AST, outer: tuple[str, ...]) -> None:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.definitions.setdefault((*outer, each.name), []).append(each)
                self._define(each, (*outer, each.name))
                continue
            if isinstance(node, ast.Module | ast.ClassDef):
                for name in _assigned(each):
                    self.definitions.setdefault((*outer, name), []).append(each)
            if isinstance(each, ast.stmt | ast.excepthandler | ast.match_case):
                self._define(each, outer)

    def spans(self, edit: Edit, name: tuple[str, ...]) -> list[Span]:
        """Return every match of the edit within the definitions of this name."""
        before, after = _parsed(edit.before), _parsed(edit.after)
        both = (_expression(before), _expression(after))
        found: list[Span] = []
        for root in self.definitions[name]:
            if _is_header(edit.before):
                found += (self._header(each, edit.after) for each in _headers(root, before[0]))
            elif None not in both:
                found += (self._expression(each, edit.after) for each in _expressions(root, before[0]))
            else:
                found += (self._statements(*each, edit.after) for each in _statements(root, before))
        return found

    def _expression(self, node: ast.expr, after: str) -> Span:
        return Span(self.start(node), self.end(node), f"({after.strip()})")

    def _header(self, node: ast.stmt, after: str) -> Span:
        start = self.start(node)
        return Span(start, start + self._colon(start), self._laid_out(node, after))

    def _colon(self, start: int) -> int:
        """Length in bytes of a header that begins at `start`, with its colon."""
        depth = lambdas = 0
        text = self.data[start:].decode()
        lines = [0]
        for line in text.splitlines(keepends=True):
            lines.append(lines[-1] + len(line))
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            depth += (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}"))
            lambdas += token.string == "lambda" and not depth
            if token.string == ":" and not depth:
                if not lambdas:
                    return len(text[: lines[token.end[0] - 1] + token.end[1]].encode())
                lambdas -= 1
        raise AssertionError("a compound statement without a colon")

    def _statements(self, nodes: Sequence[ast.stmt], is_all: bool, after: str) -> Span:
        text = after if after.strip() or not is_all else "pass\n"
        return Span(self.start(nodes[0]), self.end(nodes[-1]), self._laid_out(nodes[0], text))

    def _laid_out(self, node: ast.stmt, text: str) -> str:
        """The text at the column of this statement, as an `elif` where the statement is one."""
        indent = " " * node.col_offset
        start = self.start(node)
        if self.data[start : start + 4] == b"elif" and text.strip():
            text = "el" + text if text.startswith("if ") else "else:\n" + textwrap.indent(text, "    ")
        return textwrap.indent(text, indent).strip()

    def start(self, node: ast.stmt | ast.expr) -> int:
        decorators: list[ast.expr] = getattr(node, "decorator_list", [])
        line = min([node.lineno, *(each.lineno for each in decorators)])
        return self._lines[line - 1] + node.col_offset

    def end(self, node: ast.stmt | ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset


def parse(text: str) -> ast.Module:
    """The syntax tree without docstrings. A body that was only a docstring is `pass`."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(node, ast.mod | ast.stmt):
            code = [each for each in body if not _is_text(each)]
            body[:] = code or [ast.copy_location(ast.Pass(), body[0])]
    return tree


def mutated(name: str, edits: Sequence[Edit]) -> dict[Path, str]:
    """The text of each changed file. Raises Drifted if an edit does not apply exactly once."""
    spans: dict[Path, list[Span]] = {}
    for edit in edits:
        source, qualified = find(name, edit.place)
        found = source.spans(edit, qualified)
        if len(found) != 1:
            where = f"{edit.place} ({source.path.relative_to(ROOT)})"
            raise Drifted(f"{name}: occurs {len(found)} times in {where}:\n{edit.before}")
        spans.setdefault(source.path, []).append(found[0])
    return {path: _replaced(name, path, each) for path, each in spans.items()}


def find(name: str, place: str) -> tuple[Source, tuple[str, ...]]:
    """Return the one file that defines a place, and the qualified name in it. `name`: of the mutant, for
    errors."""
    parts = tuple(place.split("."))
    found = [
        (source_of(path), rest)
        for path, module in _modules("tests/model" if parts[0] == "tests" else "services")
        for rest in _rests(parts, module)
        if all(each in _text_of(path) for each in rest) and rest in source_of(path).definitions
    ]
    if len(found) != 1:
        files = ", ".join(str(source.path.relative_to(ROOT)) for source, _ in found)
        hint = f"defined in {files}; put the package or module before it" if found else "nowhere defined"
        raise Drifted(f"{name}: {place} is {hint}")
    return found[0]


def _rests(parts: tuple[str, ...], module: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the names that `parts` may have within the module, one for each beginning of the module's name
    that is cut off."""
    for count in range(min(len(parts), len(module)) + 1):
        rest = parts[count:]
        if parts[:count] == module[:count] and (rest or count == len(module)):
            yield rest


@cache
def _modules(under: str) -> list[tuple[Path, tuple[str, ...]]]:
    base = ROOT if under.startswith("tests") else ROOT / under
    found = []
    for path in sorted((ROOT / under).rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        found.append((path, parts[:-1] if parts[-1] == "__init__" else parts))
    return found


@cache
def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def source_of(path: Path) -> Source:
    return Source(path)


def _replaced(name: str, path: Path, spans: list[Span]) -> str:
    data = source_of(path).data
    spans = sorted(spans, key=lambda each: each.start)
    if any(one.end > other.start for one, other in pairwise(spans)):
        raise Drifted(f"{name}: two edits overlap in {path.relative_to(ROOT)}")
    for each in reversed(spans):
        data = data[: each.start] + each.text.encode() + data[each.end :]
    return data.decode()


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _assigned(node: ast.AST) -> list[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [each.id for each in targets if isinstance(each, ast.Name)]


def _is_header(text: str) -> bool:
    return text.rstrip().endswith(":")


def _parsed(text: str) -> list[ast.stmt]:
    """Statements, a header with the body `...`, or one expression over several lines."""
    if not text.strip():
        return []
    try:
        return parse(text.rstrip() + "\n    ...\n" if _is_header(text) else text).body
    except SyntaxError:
        return parse(f"({text.strip()}\n)").body


def _expression(nodes: Sequence[ast.stmt]) -> ast.expr | None:
    return nodes[0].value if len(nodes) == 1 and isinstance(nodes[0], ast.Expr) else None


def _expressions(root: ast.AST, wanted: ast.stmt) -> Iterator[ast.expr]:
    assert isinstance(wanted, ast.Expr)
    shape = ast.dump(wanted.value)
    for node in _walk(root):
        if isinstance(node, ast.expr) and type(node) is type(wanted.value) and ast.dump(node) == shape:
            yield node


def _walk(root: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those within an f-string, whose positions Python 3.11 does not give."""
    yield root
    if not isinstance(root, ast.JoinedStr):
        for each in ast.iter_child_nodes(root):
            yield from _walk(each)


def _lists(root: ast.AST) -> Iterator[list[ast.stmt]]:
    if isinstance(root, ast.stmt):
        yield [root]
    for node in ast.walk(root):
        for field in BODIES:
            body = getattr(node, field, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                yield body


def _statements(root: ast.AST, wanted: Sequence[ast.stmt]) -> Iterator[tuple[Sequence[ast.stmt], bool]]:
    """Runs of statements like these, and whether the run is the whole of its body."""
    shapes, count = [ast.dump(each) for each in wanted], len(wanted)
    for body in _lists(root):
        for first in range(len(body) - count + 1 if count else 0):
            run = body[first : first + count]
            if all(map(_is_like, run, wanted)) and [ast.dump(each) for each in run] == shapes:
                yield run, count == len(body) and body != [root]


def _is_like(one: ast.stmt, other: ast.stmt) -> bool:
    return type(one) is type(other)


def _headers(root: ast.AST, wanted: ast.stmt) -> Iterator[ast.stmt]:
    shape = header_of(wanted)
    for node in ast.walk(root):
        if isinstance(node, ast.stmt) and _is_like(node, wanted) and header_of(node) == shape:
            yield node


def header_of(node: ast.stmt) -> list[str]:
    """The shape of a compound statement without its bodies."""
    shapes = []
    for field, value in ast.iter_fields(node):
        if field not in BODIES:
            many = value if isinstance(value, list) else [value]
            shapes += [field, *(ast.dump(each) if isinstance(each, ast.AST) else repr(each) for each in many)]
    return shapes
