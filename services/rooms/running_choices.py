"""Choices of a room whose tokens are still being sampled.

Each choice ends by itself, and the room is answered with the last of them (`choices-end-alone`). The module
is pure: the caller acts on the result.
"""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class RunningChoices:
    """State of the choices of one room on decode: which are unfinished. A choice is given by its index from
    0."""

    count: int
    going_on: list[int] = field(init=False)
    """Indices of the choices that are unfinished, in ascending order. Tokens are still sampled for them."""
    cut: set[int] = field(default_factory=set)
    """Indices of the choices whose client wants no more tokens. All ranks get the same indices in the same
    turn.

    Ranks may differ in which steps have ended by then, so no agreement may depend on those steps.
    """

    def __post_init__(self) -> None:
        self.going_on = [*range(self.count)]

    def end(self, choice: int) -> bool:
        """End one choice, which must be unfinished. Return whether it was the last one, so that the room is
        answered."""
        self.going_on.remove(choice)
        return not self.going_on
