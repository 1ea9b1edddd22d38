"""Choice of the sequences in the next decode step.

Running sequences keep running. Those of admitted rooms join while there is space, in the order of their rooms
and of the choices in a room. The choice is pure: equal tables give the same step on every rank.

A further choice (n > 1) of a room begins with a row of up to a page of tokens, where other rows have one
token. As many of them begin in one step as keep its tokens within those of a full batch, and at least one. So
such a step is not much longer for the other sequences.
"""

from collections.abc import Iterable
from typing import NamedTuple

from baton.decode.decode_room import Choice, DecodeRoom


class ChoiceStep(NamedTuple):
    """Part of a decode step that belongs to one choice of a room. It is one row of the engine's batch."""

    room: DecodeRoom
    choice: Choice

    @property
    def positions(self) -> int:
        """Number of token positions that the row computes, without draft tokens."""
        return self.choice.sequence.length - self.room.filled[self.choice.place]

    @property
    def has_pages(self) -> bool:
        """Whether the choice has pages for all positions that its row computes."""
        return self.choice.sequence.length <= self.room.covered[self.choice.place]


def unfinished(rooms: Iterable[DecodeRoom]) -> list[ChoiceStep]:
    """Return the unfinished choices of decoding rooms, in the order of `rooms` and of each room's choices."""
    return [
        ChoiceStep(room, room.choices[place]) for room in rooms if room.runs for place in room.ends.going_on
    ]


def how_many(rooms: Iterable[DecodeRoom]) -> int:
    """Return the number of unfinished sequences in decoding rooms."""
    return sum(len(room.ends.going_on) for room in rooms if room.runs)


def next_batch(rooms: Iterable[DecodeRoom], max_running: int) -> list[ChoiceStep]:
    """Return the choices whose rows the next decode step computes. `rooms`: all rooms, oldest first.
    `max_running`: most sequences of a step."""
    running = unfinished(rooms)[:max_running]
    tokens = sum(not each.choice.forks for each in running)
    batch: list[ChoiceStep] = []
    begins = False
    for each in running:
        if each.choice.forks:
            tokens += each.positions
            if begins and tokens > max_running:
                continue
            begins = True
        batch.append(each)
    return batch
