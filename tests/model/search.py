"""Does every law hold in every state that the scope can reach, and can every room still end from each?

Breadth first, so that the first way to a broken law is a shortest one.
"""

import gc
import time
from array import array
from dataclasses import dataclass, field

from tests.model.events import after
from tests.model.laws import Broken, Law
from tests.model.packing import Packing, tidy
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
    """Of one core, busy."""
    complete: bool = True
    """False: states at the stated depth, or past the limit, were not explored further."""
    product_runs: int = 0
    violations: list[Violation] = field(default_factory=list)


class Search:
    def __init__(self, scope: Scope) -> None:
        self.world = World(scope)
        self._packing = Packing()
        self._numbers: dict[int, int] = {}
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
                gc.enable()
            found.states = len(self._states)
            found.depth = max(self._depths, default=0)
            found.product_runs = sum(cast.deeds for cast in self.world.casts)
            found.seconds = round(time.process_time() - started, 2)
        return found

    def _explore(self, found: Found, states_max: int | None) -> None:
        start = tidy(self.world, self.world.start())
        self._add(self._packing.pack(start), -1, 0)
        number = 0
        while number < len(self._states):
            depth = self._depths[number]
            limit = found.scope.depth
            if (limit is not None and depth >= limit) or (states_max is not None and number >= states_max):
                found.complete = False
                break
            for _, following, usual in after(self.world, self.state(number)):
                found.transitions += 1
                if isinstance(following, Broken):
                    story = tell(self.world, self.way_to(number), following)
                    found.violations.append(Violation(following.law, following.text, story))
                    return
                reached = self._reach(tidy(self.world, following), number, depth + 1)
                if usual:
                    self._from.append(number)
                    self._to.append(reached)
            number += 1
        if found.complete:
            self._check_ends(found)

    def _reach(self, state: State, parent: int, depth: int) -> int:
        word = self._packing.pack(state)
        known = self._numbers.get(word)
        return self._add(word, parent, depth) if known is None else known

    def state(self, number: int) -> State:
        scope = self.world.scope
        return self._packing.unpack(self._states[number], scope.senders.ranks, scope.receivers.ranks)

    def _add(self, word: int, parent: int, depth: int) -> int:
        number = self._numbers[word] = len(self._states)
        self._states.append(word)
        self._parents.append(parent)
        self._depths.append(depth)
        return number

    def _check_ends(self, found: Found) -> None:
        """From every state the ordinary course of things can lead to where all rooms have ended and nothing
        is held, and before the last room is issued to where it is served: no further trouble is needed."""
        idle, served, waiting = bytearray(), bytearray(), bytearray()
        for number in range(len(self._states)):
            state = self.state(number)
            idle.append(self.world.idle(state))
            served.append(self.world.served_last(state))
            waiting.append(self.world.may_serve_last(state))
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
        """Where each state's ways to it start in the list of them, and that list."""
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
