"""Tests that the garbage collector looks only at what a service made after its start."""

import subprocess
import sys

PROGRAM = """
import gc, weakref
from baton.runtime.garbage_collection import NEW_OBJECTS, freeze_loaded_objects

class Node:
    pass

def ring():
    node = Node()
    node.itself = node
    return weakref.ref(node)

loaded = [[] for _ in range(50_000)]
forgotten = ring()
freeze_loaded_objects()
assert forgotten() is None, "what was garbage by then is freed"
assert gc.get_freeze_count() > len(loaded)
assert len(gc.get_objects()) < 1_000
later = ring()
kept = [[] for _ in range(2 * NEW_OBJECTS)]
assert later() is None, "and what becomes garbage later is, too"
"""


def test_what_is_loaded_is_not_looked_through_again_and_what_comes_later_is() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
