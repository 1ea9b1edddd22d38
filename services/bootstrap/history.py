"""History for operators: last reports of workers, lost workers, refused requests. Each list has the newest
only.

No decision depends on it.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from baton.fleet.room_index import is_of
from baton.ids import Incarnation
from baton.rooms.worker_facts import WorkerFacts

EMPTY_CENSUS: Final[Mapping[str, Any]] = MappingProxyType({})

LOST_MAX: Final = 32
REFUSED_MAX: Final = 1024
WHY_CHARS_MAX: Final = 512
NO_STATUS: Final = 0
"""Status of a refused request without an HTTP status of its own: its client was answered for another prompt
of the same HTTP request."""


@dataclass(frozen=True, slots=True)
class WorkerCensusRecord:
    """Counts (census) that a worker reported with its last lease renewal."""

    values: Mapping[str, Any]
    at_ms: int
    """Time at which the worker's report came, in milliseconds of the router's monotonic clock."""
    tokens_s: float
    """Number of tokens per second that the worker computed or sampled between its last two reports."""


@dataclass(frozen=True, slots=True)
class LostWorker:
    facts: WorkerFacts
    why: str
    wall_ms: int
    rooms: int
    """Number of rooms that ended because the worker was lost."""


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A request that was refused, or given up, before it got a room."""

    request_id: str
    wall_ms: int
    waited_ms: int
    why: str
    status: int
    """HTTP status with which the client was answered, or NO_STATUS."""


class History:
    def __init__(self) -> None:
        self.censuses: dict[Incarnation, WorkerCensusRecord] = {}
        """Last reported counts of the workers that hold a lease, by incarnation."""
        self.lost: deque[LostWorker] = deque(maxlen=LOST_MAX)
        """Workers that were lost, the latest last. There are at most LOST_MAX."""
        self.refused: deque[RefusedRequest] = deque(maxlen=REFUSED_MAX)
        """Requests that were refused, the latest last. There are at most REFUSED_MAX."""

    def record_census(self, worker: Incarnation, census: Mapping[str, Any], now_ms: int) -> None:
        last = self.censuses.get(worker)
        tokens_s = 0.0
        if last is not None and now_ms > last.at_ms:
            drawn = max(census.get("tokens", 0) - last.values.get("tokens", 0), 0)
            tokens_s = drawn * 1000 / (now_ms - last.at_ms)
        self.censuses[worker] = WorkerCensusRecord(census, now_ms, tokens_s)

    def worker_lost(self, facts: WorkerFacts, why: str, wall_ms: int, rooms: int) -> None:
        self.censuses.pop(facts.incarnation, None)
        self.lost.append(LostWorker(facts, why, wall_ms, rooms))

    def refuse(self, request_id: str, why: str, status: int, wall_ms: int, waited_ms: int) -> None:
        self.refused.append(RefusedRequest(request_id, wall_ms, waited_ms, why[:WHY_CHARS_MAX], status))

    def refusal(self, request_id: str) -> RefusedRequest | None:
        """Return the newest refusal of this request id, or of one of its prompts (`ID-0`, …). None if there
        is none."""
        return next((each for each in reversed(self.refused) if is_of(each.request_id, request_id)), None)
