"""Cache of what each rank does, keyed by the rank's state and its next deed.

A rank's part of the world is a number here, and so is what it becomes: the product runs once for every
distinct (rank, deed), and is remembered. That is sound because a rank is a function of what it is and what
it is told: `baton.rooms` and `baton.pages` have no clock, no randomness and no hidden state, and
`snapshot.frozen` keeps all that they have.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tests.model.laws import CRASHES, Broken, broken_by
from tests.model.snapshot import dump, frozen, load

S = TypeVar("S")
Told = TypeVar("Told", covariant=True)


class Actor(Protocol[Told]):
    def standing(self) -> Told: ...


Deed = tuple[Any, ...]
"""A method's name and its arguments."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Answer of a rank that waits for the other ranks in the middle of a turn. What it did is taken back: the
    turn is carried out again with what all ranks have sent."""

    sent: Any
    """Data for the other ranks."""


class Cast(Generic[S]):
    """All states of ranks of one side, or of registries, that the search has met."""

    def __init__(self, check: Callable[[S, S, Deed], None]) -> None:
        """`check`: of what stood before a deed and what stands after it."""
        self._check = check
        self._numbers: dict[Hashable, int] = {}
        self._dumps: list[bytes] = []
        self.standings: list[S] = []
        self._done: dict[tuple[int, Deed], tuple[int, Any] | Broken] = {}

    def __len__(self) -> int:
        return len(self._dumps)

    @property
    def deeds(self) -> int:
        """Return how often the product itself was run."""
        return len(self._done)

    def enter(self, rank: Actor[S]) -> int:
        """Return the number of a state like this one, which is stored if it is new. Raises Broken if it must
        not be."""
        key = frozen(rank)
        number = self._numbers.get(key)
        if number is None:
            standing = rank.standing()
            number = self._numbers[key] = len(self._dumps)
            self._dumps.append(dump(rank))
            self.standings.append(standing)
        return number

    def do(self, number: int, deed: Deed) -> tuple[int, Any]:
        """Carry out a deed, and return the number of the state afterwards with the answer. Raises Broken."""
        key = (number, deed)
        known = self._done.get(key)
        if known is None:
            known = self._done[key] = self._run(number, deed)
        if isinstance(known, Broken):
            raise known
        return known

    def _run(self, number: int, deed: Deed) -> tuple[int, Any] | Broken:
        rank = load(self._dumps[number])
        try:
            answer = getattr(rank, deed[0])(*deed[1:])
            if isinstance(answer, Waits):
                return number, answer
            after = self.enter(rank)
            if after != number:
                self._check(self.standings[number], self.standings[after], deed)
        except Broken as broken:
            return broken.with_traceback(None)
        except CRASHES as error:
            return broken_by(error)
        return after, answer
