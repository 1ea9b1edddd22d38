"""What does the bootstrap keep for people to look at, that no decision needs?

What each worker said of itself last, which workers went, and which requests never got a room. All of it is
bounded: the newest are kept.
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
"""Of one that failed with another prompt of its HTTP request: the client was answered for that one."""


@dataclass(frozen=True, slots=True)
class WorkerCensusRecord:
    """What a worker said of itself with its last renewal."""

    values: Mapping[str, Any]
    at_ms: int
    """On the bootstrap's own monotonic clock."""
    tokens_s: float
    """Computed or drawn, between the last two."""


@dataclass(frozen=True, slots=True)
class LostWorker:
    facts: WorkerFacts
    why: str
    wall_ms: int
    rooms: int
    """That ended with it."""


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A request that no room was opened for."""

    request_id: str
    wall_ms: int
    waited_ms: int
    why: str
    status: int
    """That the client was answered with, or NO_STATUS."""


class History:
    def __init__(self) -> None:
        self.censuses: dict[Incarnation, WorkerCensusRecord] = {}
        """Of the workers that hold a lease."""
        self.lost: deque[LostWorker] = deque(maxlen=LOST_MAX)
        """The latest last."""
        self.refused: deque[RefusedRequest] = deque(maxlen=REFUSED_MAX)
        """The latest last."""

    def record_census(self, worker: Incarnation, told: Mapping[str, Any], now_ms: int) -> None:
        last = self.censuses.get(worker)
        tokens_s = 0.0
        if last is not None and now_ms > last.at_ms:
            drawn = max(told.get("tokens", 0) - last.values.get("tokens", 0), 0)
            tokens_s = drawn * 1000 / (now_ms - last.at_ms)
        self.censuses[worker] = WorkerCensusRecord(told, now_ms, tokens_s)

    def worker_lost(self, facts: WorkerFacts, why: str, wall_ms: int, rooms: int) -> None:
        self.censuses.pop(facts.incarnation, None)
        self.lost.append(LostWorker(facts, why, wall_ms, rooms))

    def refuse(self, request_id: str, why: str, status: int, wall_ms: int, waited_ms: int) -> None:
        self.refused.append(RefusedRequest(request_id, wall_ms, waited_ms, why[:WHY_CHARS_MAX], status))

    def refusal(self, request_id: str) -> RefusedRequest | None:
        """The newest of that id, or of one of its prompts."""
        return next((each for each in reversed(self.refused) if is_of(each.request_id, request_id)), None)
