"""Which of a room's choices go on?

Each ends by itself, and the room is answered with the last of them (`choices-end-alone`). Pure: the caller
performs what follows.
"""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Choices:
    """Of one room, from 0 on."""

    count: int
    over: set[int] = field(default_factory=set)
    """Nothing more is drawn for these."""
    cut: set[int] = field(default_factory=set)
    """Whose reader had all it wanted of them, as every rank was told in one turn. Which of their steps have
    ended is not the same on every rank: nothing that ranks agree on may follow from it."""

    @property
    def going_on(self) -> list[int]:
        return [choice for choice in range(self.count) if choice not in self.over]

    def end(self, choice: int) -> bool:
        """Whether it was the last that went on, so that the room is answered. At most once for each."""
        last = self.going_on == [choice]
        self.over.add(choice)
        return last
