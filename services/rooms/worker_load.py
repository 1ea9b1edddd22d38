"""Load of a worker, as it reports it to the router.

A worker reports with each renewal of its lease, and whenever a room on it ends.
"""

from dataclasses import dataclass

from baton.ids import PageCounts, RoomId


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker says of itself, as of one moment between two of its turns."""

    free: PageCounts
    """Of each group: pages that a room could be granted now, beyond what is left for those that run."""
    asked: PageCounts
    """Of each group: pages that the rooms ask for which are not granted yet."""
    waiting: int
    """How many rooms those are."""
    running: int
    """Sequences of granted rooms that go on."""
    running_max: int
    """Sequences that a step continues at most; 0: not said."""
    entered: RoomId
    """The highest id among its rooms; 0 without any. Ids ascend in the order in which they are issued."""
    number: int = 0
    """Higher than that of any which the same process said before."""
    tokens_waiting: int = 0
    """Of a prefill worker: tokens that it has yet to compute of its rooms, by what they cost."""
    tokens_per_s: int = 0
    """Of a prefill worker: that it computed of late in a second of computing; 0: it has not."""
    score_price: int = 0
    """Of a prefill worker: thousandths of a token by which a token that is scored counts for more, in both
    (`counted-work`)."""
