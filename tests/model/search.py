"""Breadth-first search of a scope: every law holds in every state, and every room can end from each.

Breadth first, so that the first way to a broken law is a shortest one.
"""

import gc
import time
from array import array
from dataclasses import dataclass, field

from tests.model.events import begin
from tests.model.following import Following
from tests.model.laws import Broken, Law
from tests.model.packing import Packing
from tests.model.scopes import Scope
from tests.model.tell import tell
from tests.model.world import State, World


@dataclass(frozen=True, slots=True)
class Violation:
    law: Law
    text: str
    story: str
    """A shortest way there, close to the language of tests/stories."""


@dataclass(slots=True)
class Found:
    scope: Scope
    states: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    """CPU seconds of one core."""
    complete: bool = True
    """False: states at the stated depth, or past the limit, were not explored further."""
    product_runs: int = 0
    violations: list[Violation] = field(default_factory=list)


class Search:
    def __init__(self, scope: Scope) -> None:
        self.world = World(scope)
        self._packing = Packing()
        self._following = Following(self.world, self._packing)
        self._numbers: dict[int, int] = {}
        """Number of each state, by the word under which it was met, reduced or not."""
        self._states: list[int] = []
        self._parents = array("q")
        self._depths = array("H")
        self._from = array("q")
        self._to = array("q")
        """The ordinary steps between states, for the way back from the end."""

    def run(self, *, states_max: int | None = None) -> Found:
        """Stops at the first broken law, or when everything was seen."""
        started = time.process_time()
        found = Found(self.world.scope)
        collecting = gc.isenabled()
        gc.disable()  # nearly all that is made here is kept, and looking through it takes a third of the time
        try:
            self._explore(found, states_max)
        finally:
            if collecting:
                gc.freeze()
                gc.enable()
            found.states = len(self._states)
            found.depth = max(self._depths, default=0)
            found.product_runs = sum(cast.deeds for cast in self.world.casts)
            found.seconds = round(time.process_time() - started, 2)
        return found

    def _explore(self, found: Found, states_max: int | None) -> None:
        try:
            self._reach(self._packing.pack(begin(self.world)), -1, 0)
        except Broken as broken:
            found.violations.append(Violation(broken.law, broken.text, "# before the search begins"))
            return
        numbers, starts, ends = self._numbers, self._from, self._to
        number = 0
        while number < len(self._states):
            depth = self._depths[number]
            limit = found.scope.depth
            if (limit is not None and depth >= limit) or (states_max is not None and number >= states_max):
                found.complete = False
                break
            try:
                usual, trouble = self._following.of(self._states[number])
                for word in usual:
                    reached = numbers.get(word)
                    if reached is None:
                        reached = self._reach(word, number, depth + 1)
                    starts.append(number)
                    ends.append(reached)
                for word in trouble:
                    if word not in numbers:
                        self._reach(word, number, depth + 1)
            except Broken as broken:
                story = tell(self.world, self.way_to(number), broken)
                found.violations.append(Violation(broken.law, broken.text, story))
                return
            found.transitions += len(usual) + len(trouble)
            number += 1
        if found.complete:
            self._check_ends(found)

    def _reach(self, word: int, parent: int, depth: int) -> int:
        """The number of a state that is met under this word for the first time. Raises Broken."""
        self._following.check(word)
        tidied = self._following.tidy(word)
        number = self._numbers.get(tidied)
        if number is None:
            number = self._numbers[tidied] = len(self._states)
            self._states.append(tidied)
            self._parents.append(parent)
            self._depths.append(depth)
        self._numbers[word] = number
        return number

    def state(self, number: int) -> State:
        return self._packing.unpack(self._states[number])

    def _check_ends(self, found: Found) -> None:
        """Check that from every state, without further trouble, all rooms can end with nothing held. Before
        the last room is issued, it must be able to be served."""
        idle, served, waiting = bytearray(), bytearray(), bytearray()
        for word in self._states:
            is_idle, is_served, is_waiting = self._following.end(word)
            idle.append(is_idle)
            served.append(is_served)
            waiting.append(is_waiting)
        back = self._backwards()
        for law, good, asked, text in (
            (Law.ROOM_ENDS, idle, None, "not every room can end with nothing held"),
            (Law.RECONNECT, served, waiting, "the next room cannot be served, without trouble of its own"),
        ):
            self._spread(good, back)
            missing = [n for n in range(len(good)) if not good[n] and (asked is None or asked[n])]
            if missing:
                broken = Broken(law, f"from here ({len(missing)} such states) {text}")
                story = tell(self.world, self.way_to(missing[0]), broken)
                found.violations.append(Violation(law, broken.text, story))
                return

    def _backwards(self) -> "tuple[array[int], array[int]]":
        """Return the start of each state's predecessors in a list, and that list."""
        starts = array("q", bytes(8 * (len(self._states) + 2)))
        for end in self._to:
            starts[end + 2] += 1
        for number in range(2, len(starts)):
            starts[number] += starts[number - 1]
        before = array("q", bytes(8 * len(self._to)))
        for start, end in zip(self._from, self._to, strict=True):
            before[starts[end + 1]] = start
            starts[end + 1] += 1
        return starts, before

    def _spread(self, good: bytearray, back: "tuple[array[int], array[int]]") -> None:
        """Mark every state from which a marked one can be reached."""
        starts, before = back
        frontier = [number for number in range(len(good)) if good[number]]
        while frontier:
            number = frontier.pop()
            for index in range(starts[number], starts[number + 1]):
                if not good[before[index]]:
                    good[before[index]] = 1
                    frontier.append(before[index])

    def way_to(self, number: int) -> list[State]:
        """The states on a shortest way from the start."""
        way = []
        while number >= 0:
            way.append(self.state(number))
            number = self._parents[number]
        return way[::-1]
