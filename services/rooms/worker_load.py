"""Load of a worker, as it reports it to the router.

A worker reports with each renewal of its lease, and whenever a room on it ends.
"""

from dataclasses import dataclass

from baton.ids import PageCounts, RoomId


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Load of a worker at one moment between two of its turns."""

    free: PageCounts
    """Pages that a new room could be granted now, by KV group. Those reserved for growth of running rooms are
    not counted."""
    asked: PageCounts
    """Pages that waiting rooms need and have not been granted, by KV group."""
    waiting: int
    """Number of waiting rooms."""
    running: int
    """Number of running sequences in granted rooms."""
    running_max: int
    """Most sequences of a step; 0 if not given."""
    entered: RoomId
    """Highest id among its rooms; 0 without any. Ids are issued in ascending order."""
    number: int = 0
    """Serial number. Each report of a process has a higher one than those before."""
    tokens_waiting: int = 0
    """Tokens that a prefill worker has yet to compute, by their cost."""
    tokens_per_s: int = 0
    """Prompt tokens that a prefill worker computes in a second of computing; 0 if it has not computed any."""
    score_price: int = 0
    """Extra cost of scoring one prompt token on a prefill worker, in thousandths of a token (`counted-work`).
    It counts in the two fields above."""
