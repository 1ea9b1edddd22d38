"""What does the engine note of a sequence, from one step to the next?"""

from dataclasses import dataclass, field

import torch

from baton.engine_interface import Sequence


@dataclass(slots=True, eq=False)
class Seen:
    """Which tokens a sequence has, each once, up to some position: for penalties."""

    stop: int = 0
    ids: set[int] = field(default_factory=set)
    places: torch.Tensor | None = None
    """The same, where scores are."""


@dataclass(slots=True, eq=False)
class Notes:
    tail_page: int = -1
    """The page, partly used, whose unused end was zeroed for this sequence."""
    seen: Seen = field(default_factory=Seen)


def notes_of(sequence: Sequence) -> Notes:
    """The same ones at every call."""
    notes = sequence.notes
    if not isinstance(notes, Notes):
        notes = sequence.notes = Notes()
    return notes
