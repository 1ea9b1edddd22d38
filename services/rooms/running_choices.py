"""Which of a room's choices go on?

Each ends by itself, and the room is answered with the last of them (`choices-end-alone`). Pure: the caller
performs what follows.
"""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class RunningChoices:
    """Of one room, from 0 on."""

    count: int
    going_on: list[int] = field(init=False)
    """In their order: more is drawn for these."""
    cut: set[int] = field(default_factory=set)
    """Whose reader had all it wanted of them, as every rank was told in one turn. Which of their steps have
    ended is not the same on every rank: nothing that ranks agree on may follow from it."""

    def __post_init__(self) -> None:
        self.going_on = [*range(self.count)]

    def end(self, choice: int) -> bool:
        """Whether it was the last that went on, so that the room is answered. Once for each."""
        self.going_on.remove(choice)
        return not self.going_on
