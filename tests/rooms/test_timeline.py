"""Tests of the vocabulary of timelines: it is closed, documented, and never spelt outside the enum."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import pairwise
from pathlib import Path
from typing import Final

from baton.rooms import timeline
from baton.rooms.timeline import Event, Moment
from tests.rooms.pages import generated

SERVICES: Final = Path(timeline.__file__).parents[1]
WORDS: Final = frozenset(each.value for each in Moment)
WRITERS: Final = frozenset({"note", "seen", "tell", "line", "event"})
"""Methods that take a line's name."""


def docstrings() -> Mapping[Moment, str]:
    """Return the docstring below each member of Moment, by member."""
    [body] = [
        node.body
        for node in ast.parse(Path(timeline.__file__).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == Moment.__name__
    ]
    found: dict[Moment, str] = {}
    for member, text in pairwise(body):
        match member, text:
            case ast.Assign([ast.Name(name)]), ast.Expr(ast.Constant(str(said))):
                found[Moment[name]] = said
            case _:
                pass
    return found


OF: Final[Mapping[str, Set[str]]] = {
    "bootstrap": {"Router"},
    "prefill": {"Prefill"},
    "decode": {"Decode"},
    "handover/opened_room.py": {"Router"},
    "handover/sending_side.py": {"Prefill"},
    "handover/receiving_side.py": {"Decode"},
    "handover/landed_data.py": {"Decode"},
    "handover/handover_side.py": {"Prefill", "Decode"},
    "worker": {"Prefill", "Decode"},
    "wire": {"No process"},
}
"""Writers that the table may name for a line, by the source that writes it."""
NAMED: Final[Mapping[str, Set[str]]] = {
    "Both workers": {"Prefill", "Decode"},
    "Every rank": {"Prefill", "Decode"},
    "Both workers and the router": {"Prefill", "Decode", "Router"},
    "Decode and the router": {"Decode", "Router"},
    "Prefill, every rank": {"Prefill"},
    "Decode, every rank": {"Decode"},
}


def written(source: str) -> Iterator[Moment]:
    """Yield the moments that a source passes to a call or keeps in a dict, which is how they are recorded."""
    for node in ast.walk(ast.parse(source)):
        for value in node.args if isinstance(node, ast.Call) else getattr(node, "values", ()):
            match value:
                case ast.Attribute(ast.Name("Moment"), name):
                    yield Moment[name]
                case _:
                    pass


def is_name(node: ast.expr) -> bool:
    """An expression for what a line says: `line.name`, `event["name"]`."""
    match node:
        case ast.Attribute(attr="name") | ast.Subscript(slice=ast.Constant("name")):
            return True
        case _:
            return False


def spelt(source: str) -> Iterator[str]:
    """Words of the vocabulary that a source writes into a line, or compares with one, as bare strings."""
    beside: Iterable[ast.AST]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr=method), args=args) if method in WRITERS:
                beside = args
            case ast.Call(func=ast.Name(id=called), args=args) if called == Event.__name__:
                beside = args
            case ast.Compare(left, _, others) if any(map(is_name, (left, *others))):
                beside = [part for each in (left, *others) for part in ast.walk(each)]  # also of a tuple
            case ast.Match(subject, cases) if is_name(subject):
                beside = [part for each in cases for part in ast.walk(each.pattern)]
            case _:
                continue
        yield from (each.value for each in beside if isinstance(each, ast.Constant) and each.value in WORDS)


def test_each_word_says_who_writes_it_and_what_it_means() -> None:
    said = docstrings()
    assert list(said) == list(Moment)
    for word, text in said.items():
        assert re.fullmatch(r"[A-Z][^:]+: [^\n]+\.", text), word


def test_each_word_is_written_by_those_whom_it_names() -> None:
    found: dict[Moment, set[str]] = {}
    for where, whose in OF.items():
        place = SERVICES / where
        for path in place.rglob("*.py") if place.is_dir() else [place]:
            for word in written(path.read_text()):
                found.setdefault(word, set()).update(whose)
    said = {word: text.partition(":")[0] for word, text in docstrings().items()}
    assert found == {word: NAMED.get(who, {who}) for word, who in said.items()}


def test_the_page_has_every_word(rewrite: bool) -> None:
    rows = [f"| `{word}` | {' | '.join(text.split(': ', 1))[:-1]} |" for word, text in docstrings().items()]
    generated("timeline", ["| line | written by | what it says |", "|---|---|---|", *rows], rewrite=rewrite)


def test_no_source_spells_a_word_beside_the_enum() -> None:
    found = {
        str(path.relative_to(SERVICES)): words
        for path in SERVICES.rglob("*.py")
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")) and (words := list(spelt(path.read_text())))
    }
    assert found == {}


def test_a_spelt_word_is_seen_wherever_it_may_stand() -> None:
    for source in (
        'reporter.note(room, "granted")',
        'Event(0, "decode-0", "landed")',
        'line.name == "failed"',
        'event["name"] in ("answered", x)',
        'match line.name:\n case "queued" | "opened": ...',
    ):
        assert list(spelt(source)), source
    assert not list(spelt('log.info("connected"); phase = "failed"; worker.name == "prefill"'))


def test_the_ui_asks_for_words_that_there_are() -> None:
    asked = [
        word
        for path in (SERVICES / "bootstrap" / "ui").glob("*.js")
        for word in re.findall(r'\bat\("([^"]+)"\)|\.name === "([^"]+)"', path.read_text())
    ]
    words = {word for pair in asked for word in pair} - {"", "request"}
    assert words
    assert words <= WORDS
