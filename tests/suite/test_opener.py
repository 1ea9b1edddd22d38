"""Test that the model sends workers only what the product's `OpenedRoom` and `Registry` request.

Which worker gets a room, its end or the end of a choice is decided there. A function of the model that sends
such a message by itself would be a second copy of a decision. It would go on proving what the product does no
more.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MODEL: Final = Path(__file__).parents[1] / "model"
MESSAGES: Final = {"open", "cancel", "end_choice"}
"""Second element of a message of the model to a worker: what the worker is to do."""
CARRIES_OUT: Final = {
    "registry.py: _carry_out": "requests of a room at its opener",
    "registry.py: cancel": "the sides that the registry names",
    "registry.py: joined": "the ends that the registry has for a worker that comes back",
    "stream.py: cancel_here": "the session of a pair ends a room on its own worker",
}
"""Functions of the model that send such a message, and what they carry out."""


def senders(source: str) -> Iterator[str]:
    """Yield the name of each function that makes a message to a worker, and does not only compare with it."""
    functions = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef)]
    for function in functions:
        nodes = list(ast.walk(function))
        compared = [each for node in nodes if isinstance(node, ast.Compare) for each in node.comparators]
        for node in nodes:
            match node:
                case ast.Tuple([_, ast.Constant(str(deed)), *_]) if deed in MESSAGES and node not in compared:
                    yield function.name


def test_the_model_sends_no_worker_what_the_product_does_not_request() -> None:
    found = {f"{path.name}: {name}" for path in MODEL.glob("*.py") for name in senders(path.read_text())}
    assert found <= CARRIES_OUT.keys()
    assert "registry.py: _carry_out" in found


def test_a_message_is_seen_however_it_is_sent() -> None:
    by_hand = "def over(state):\n    calls = {(side, 'cancel', 7, why) for side in SIDES}\n    return calls\n"
    by_hand += "def issue(state):\n    return state.send((PREFILL, 'open', room))\n"
    assert list(senders(by_hand)) == ["over", "issue"]
    assert not list(senders("def read(message):\n    return message[:2] == (PREFILL, 'cancel')\n"))
