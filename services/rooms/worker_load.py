"""Load of a worker, as the worker reports it to the router.

A worker sends a report with each renewal of its lease, and whenever a room on it ends.
"""

from dataclasses import dataclass

from baton.ids import PageCounts, RoomId


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Load of a worker at one moment between two turns (iterations of its loop)."""

    free: PageCounts
    """Number of pages that a new room could get now, by KV group. Pages reserved for the growth of running
    rooms are not counted."""
    requested: PageCounts
    """Number of pages that the waiting rooms need, by KV group."""
    waiting: int
    """Number of rooms on the worker that wait for pages."""
    running: int
    """Number of running sequences, over all rooms that have pages."""
    running_max: int
    """Most sequences in a step of the worker; 0 if not given."""
    entered: RoomId
    """Highest id among the worker's present rooms, or 0 if it has none. Ids are issued in ascending order, so
    the router sees which rooms the report includes."""
    number: int = 0
    """Serial number of the report, which grows with each report of a process. Older reports that arrive late
    are recognized by it."""
    tokens_waiting: int = 0
    """Number of prompt tokens that a prefill worker still has to compute. A scored token counts for more, by
    its cost."""
    tokens_per_s: int = 0
    """Prefill throughput in prompt tokens per second of computing. 0 if it is not known."""
    score_price: int = 0
    """Extra cost of scoring one prompt token on a prefill worker, in thousandths of the cost of computing a
    token (`counted-work`). It is counted in `tokens_waiting` and `tokens_per_s`."""
    other_rooms: int = 0
    """Number of rooms on the worker that other routers opened. They take places, too."""
