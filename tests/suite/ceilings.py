"""Counts of unwanted things in the sources, the docs and the tests, which have to become fewer."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SERVICES: Final = ROOT / "services"
TESTS: Final = ROOT / "tests"
GENERATED: Final = SERVICES / "wire" / "baton"
FRAGMENT: Final = re.compile(r"(Of|That|By|And)\b")
FORBIDDEN: Final = re.compile(
    r"(?:^|_)(tell|told|hear|heard|hears|say|said|says|speak|voice|thoughts?|asked|kept|held)(?:_|$)"
)
SENTENCE_WORDS: Final = 30
FILE_LINES: Final = 400
FUNCTION_LINES: Final = 60
FOLDER_FILES: Final = 25
LONG_FILES: Final = {
    "handover/receiving_side.py": "one side of one state machine: its commands, its news and its moves",
}
"""Files that are longer than FILE_LINES, since a cut would make them worse to read, and why. At most 4."""
SHARED_NAMES: Final = frozenset(
    {"__init__", "settings", "wiring", "metrics", "errors", "routes", "engine_startup"}
)
"""File names that several packages have."""
CODE: Final = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
ASIDE: Final = re.compile(r"^(\||#|>|!\[|\[[^\]]+\]:|\s*<).*$", re.MULTILINE)
"""Lines of Markdown that are no prose: tables, headings, quotations, pictures, addresses, HTML."""
LINK: Final = re.compile(r"\[([^\]]*)\]\([^)]*\)")
PARAGRAPH: Final = re.compile(r"\n\s*\n|\n\s*(?:[*\-]|\d+\.)\s")
END_OF_SENTENCE: Final = re.compile(r"[.!?:](?=\s|$)")
PRIVATE: Final = re.compile(r"(?<!self)(?<!cls)\._[a-z]\w*")
DEFINITIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@cache
def sources() -> dict[Path, ast.Module]:
    """Return each file of the product with its syntax tree, without generated code."""
    files = (path for path in sorted(SERVICES.rglob("*.py")) if not path.is_relative_to(GENERATED))
    return {path: ast.parse(path.read_text()) for path in files}


def docstrings() -> Iterator[str]:
    """Yield all docstrings: those of modules, classes, functions, attributes and constants."""
    for tree in sources().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for statement in node.body:
                    match statement:
                        case ast.Expr(value=ast.Constant(value=str(text))):
                            yield text


def fragments() -> int:
    """Count docstrings that begin with a word that leads to no sentence."""
    return sum(FRAGMENT.match(text.strip()) is not None for text in docstrings())


def forbidden_names() -> int:
    """Count files, classes and functions with a word in their names that CONTRIBUTING rules out."""
    names = [path.stem for path in sources()]
    for tree in sources().values():
        names += [node.name for node in ast.walk(tree) if isinstance(node, DEFINITIONS)]
    words = (re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() for name in names)
    return sum(FORBIDDEN.search(word) is not None for word in words)


def long_sentences(text: str) -> int:
    """Count sentences of more than SENTENCE_WORDS words. A colon ends a sentence."""
    plain = LINK.sub(r"\1", CODE.sub("code", text))
    sentences = (each for part in PARAGRAPH.split(plain) for each in END_OF_SENTENCE.split(part))
    return sum(len(re.findall(r"[\w'’-]+", each)) > SENTENCE_WORDS for each in sentences)


def long_sentences_of_docs() -> int:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sum(long_sentences(ASIDE.sub("", page.read_text())) for page in pages)


def long_sentences_of_docstrings() -> int:
    return sum(map(long_sentences, docstrings()))


def equal_file_names() -> int:
    """Count files of the product whose name another one has, too, without the names that packages share."""
    names = Counter(path.stem for path in sources())
    return sum(count for name, count in names.items() if count > 1 and name not in SHARED_NAMES)


def empty_packages() -> int:
    """Count packages without a docstring."""
    return sum(path.stem == "__init__" and not ast.get_docstring(tree) for path, tree in sources().items())


def long_files() -> int:
    """Count files of more than FILE_LINES lines, without the exceptions."""
    named = {SERVICES / each for each in LONG_FILES}
    return sum(len(path.read_text().splitlines()) > FILE_LINES for path in sources() if path not in named)


def long_functions() -> int:
    nodes = (node for tree in sources().values() for node in ast.walk(tree))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return sum((node.end_lineno or 0) - node.lineno >= FUNCTION_LINES for node in functions)


def private_reads() -> int:
    """Count places where a test reads an attribute of another object whose name begins with `_`."""
    return sum(len(PRIVATE.findall(path.read_text())) for path in TESTS.rglob("*.py"))


def crowded_folders() -> int:
    """Count files of the product beyond FOLDER_FILES in one folder."""
    files = Counter(path.parent for path in sources())
    return sum(max(count - FOLDER_FILES, 0) for count in files.values())
