"""Choices of a room that are still being drawn.

Each choice ends by itself, and the room is answered with the last of them (`choices-end-alone`). Pure: the
caller acts on the result.
"""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class RunningChoices:
    """Choices of one room, numbered from 0 on."""

    count: int
    going_on: list[int] = field(init=False)
    """Choices that more is drawn for, in ascending order."""
    cut: set[int] = field(default_factory=set)
    """Choices whose reader wants no more. Every rank gets them in the same turn. Which of their steps have
    ended differs between ranks, so no agreement may depend on that."""

    def __post_init__(self) -> None:
        self.going_on = [*range(self.count)]

    def end(self, choice: int) -> bool:
        """End a choice, once. Return whether it was the last, so that the room is answered."""
        self.going_on.remove(choice)
        return not self.going_on
