"""Which sequences take part in the next step?

Those that run keep running; those of admitted rooms join in the order of their rooms, a room's choices in
theirs, while there is space. Pure: the same tables give the same step on every rank.

A further choice begins with a row of up to a page of tokens, where others have one token: so many begin in
one step that it computes no more tokens than a full batch does, or one. So those that run beside them wait
for no more than such a step.
"""

from collections.abc import Iterable
from typing import NamedTuple

from baton.decode.decode_room import Choice, DecodeRoom


class ChoiceStep(NamedTuple):
    """Of a choice, in a step of the batch."""

    room: DecodeRoom
    choice: Choice

    @property
    def positions(self) -> int:
        """That its row computes, drafts aside."""
        return self.choice.sequence.length - self.room.filled[self.choice.place]

    @property
    def has_pages(self) -> bool:
        """For all that its row computes."""
        return self.choice.sequence.length <= self.room.covered[self.choice.place]


def unfinished(rooms: Iterable[DecodeRoom]) -> list[ChoiceStep]:
    """Choices of admitted rooms that go on, in the order of `rooms`, oldest first, and of each room's."""
    return [
        ChoiceStep(room, room.choices[place]) for room in rooms if room.runs for place in room.ends.going_on
    ]


def how_many(rooms: Iterable[DecodeRoom]) -> int:
    """Sequences that go on."""
    return sum(len(room.ends.going_on) for room in rooms if room.runs)


def next_batch(rooms: Iterable[DecodeRoom], max_running: int) -> list[ChoiceStep]:
    """`rooms`: all that there are, oldest first."""
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
