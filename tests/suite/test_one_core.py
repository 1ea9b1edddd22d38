"""Tests that no test performs a move's effect or sends a message by itself, instead of driving the product.

What joins a room's phase with its memory lives in `services/handover`. A test that reserves, exposes or gives
back by itself would be a second copy of it, and would go on proving what the product does no more.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parents[1]
OF_THESE_CLASSES: Final = ("pages", "rooms")
"""Folders of the unit tests of holdings, pools and rosters themselves."""
WITHOUT_MEMORY: Final = {
    "decode/test_landing_polls.py": "rooms in some phases, to be waited for",
    "handover/test_turn.py": "rooms that ranks vote on in one turn",
    "parallel/test_causes.py": "rooms whose causes ranks tell each other",
    "parallel/test_dimensions.py": "rooms that ranks vote on, however many",
    "process/hooks.py": "a room on one rank alone: the fault that is tried",
}
"""Rosters are opened there, and nothing is held for them."""
OF_A_SESSION: Final = frozenset({"connect", "grant", "claim", "close", "connected", "quiet"})
"""Messages of the model that only the two halves of a session may send."""
LATE: Final = {"troubles.py": 1}
"""Messages that the model sends by itself: a connect that comes when its receiver expects no answer."""
EFFECTS: Final = {
    "holdings": {"take", "expose", "commit", "keep", "quarantine", "distrust", "give_back"},
    "roster": {"open", "cancel", "retire", "give_up"},
    "pool": {"reserve", "expose", "commit", "quarantine", "cache", "release"},
    "slots": {"hand_out", "expose", "commit", "quarantine", "release", "moved"},
}
"""Effects by the name of the object that performs them."""


def effects(source: str) -> Iterator[str]:
    """Yield each effect that the source calls or passes on, as `line: method`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in EFFECTS.get(_called(node.value), ()):
            yield f"{node.lineno}: {ast.unparse(node)}"


def _called(owner: ast.expr) -> str:
    """Return the object's name, without the underscore of private names and the plural s."""
    match owner:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            name = name.lstrip("_")
        case ast.Subscript(value=several):
            name = _called(several)
        case _:
            return ""
    return {"rosters": "roster", "pools": "pool"}.get(name, name)


def test_no_test_performs_an_effect_by_itself() -> None:
    found = {}
    for path in TESTS.rglob("*.py"):
        name, source = path.relative_to(TESTS), path.read_text()
        if name.parts[0] in OF_THESE_CLASSES or not any(word in source for word in ("roster", "holdings")):
            continue
        there = [each for each in effects(source) if str(name) not in WITHOUT_MEMORY or "roster" not in each]
        if there:
            found[str(name)] = there
    assert found == {}


def test_an_effect_is_seen_however_its_object_is_reached() -> None:
    by_hand = (
        "holding = self._holdings.take(room, 3)\nroster.retire(room, 0)\nrosters[rank].open(room, make, 0)\n"
    )
    by_hand += "memory.holdings.slots.release(slot)\nholdings.pools[0].reserve(2)\npool.release(pages)\n"
    by_hand += "each(rooms, self.holdings.give_back)\n"
    assert len(list(effects(by_hand))) == 7
    assert not list(effects("sending.take(command)\nopen(path)\nbag.take(3)\nself._holdings.get(room)\n"))


def messages(source: str) -> Iterator[str]:
    """Yield each message of a session that the source writes out, as `line: message`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Tuple(elts=[ast.Name(id="PREFILL" | "DECODE"), ast.Constant(value=str(deed)), *_]):
                if deed in OF_A_SESSION:
                    yield f"{node.lineno}: {ast.unparse(node)}"


def test_the_model_sends_only_what_the_halves_of_a_session_request() -> None:
    sources = {path.name: path.read_text() for path in (TESTS / "model").glob("*.py")}
    assert any("linked(" in source for source in sources.values())
    found = {name: len(there) for name, source in sources.items() if (there := list(messages(source)))}
    assert found == LATE


def test_a_message_that_is_written_out_is_seen() -> None:
    by_hand = 'state.send((PREFILL, "grant", room))\nmail | {(DECODE, "quiet", room, 5)}\n'
    assert len(list(messages(by_hand))) == 2
    assert not list(messages('(PREFILL, "open", room)\n(PREFILL, verb, room)\n(side, "grant")\n'))
