"""Live view of one bootstrap: workers with their queues and pages, its own rooms, and its last requests.

`stack_view` adds what the other bootstraps have. The size of each list is bounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from baton.api.errors import CLIENT_GONE
from baton.bootstrap.history import NO_STATUS, LostWorker, RefusedRequest
from baton.bootstrap.room_controller import RoomController
from baton.bootstrap.timeline.drawing import last_word
from baton.bootstrap.timeline.request_timeline import cause_of, state_of
from baton.bootstrap.timeline.retry_chains import Chain, RetryChains
from baton.bootstrap.timeline.timeline_schema import OVER, State
from baton.fleet.room_entry import RoomPhase
from baton.fleet.worker_record import Worker
from baton.rooms.phases import Side
from baton.rooms.queues import RoomQueue
from baton.rooms.timeline import BOOTSTRAP, Moment

REQUESTS_MAX: Final = 500
"""Most requests that one page lists."""
RECENT: Final = 50
FAILED: Final = 10
PHASES: Final = tuple(phase.value for phase in RoomPhase if phase is not RoomPhase.RETIRED)


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of one request, as the list of requests shows it."""

    request_id: str
    room: str
    """Id of the request's last room. Empty if the request has had none."""
    rooms: int
    state: State
    begun_wall_ms: int
    total_ms: int
    first_token_ms: int | None
    prefill: str
    decode: str
    same_process: bool
    """Whether the decode worker's process would be the prefill worker, too, so that nothing is handed
    over."""
    reason: str
    cause: str


def workers(rooms: RoomController) -> dict[str, Any]:
    """Return the workers that hold a lease, by side and name, and those that were lost last, as JSON."""
    now_ms = rooms.clock.now_ms()
    found = sorted(
        rooms.registry.workers(), key=lambda each: (each.facts.side is not Side.PREFILL, each.facts.name)
    )
    return {
        "workers": [_worker(each, rooms, now_ms) for each in found],
        "lost": [_lost(each) for each in reversed(rooms.history.lost)],
    }


def requests(rooms: RoomController, limit: int, search: str, *, failed: bool) -> list[Summary]:
    """Return summaries of requests, the newest first. Waiting and refused requests, which have no room, are
    placed by their time."""
    chains = RetryChains(rooms.registry)
    queue = () if failed else (each for each in rooms.admission.waiting(had_none=True) if search in each[0])
    waiting = [_waiting(name, rooms, event.wall_ms) for name, event in islice(queue, limit)]
    refused = (
        each
        for each in reversed(rooms.history.refused)
        if search in each.request_id and not (failed and each.status == CLIENT_GONE)
    )
    found = [*waiting, *(_refused(each) for each in islice(refused, limit))]
    found += [_summary(each, rooms) for each in chains.newest(limit, search=search, failed=failed)]
    return sorted(found, key=lambda each: each.begun_wall_ms, reverse=True)[:limit]


def summary(rooms: RoomController) -> dict[str, Any]:
    """Return this bootstrap's queue, rooms and newest requests, and the workers that are ready for it, as
    JSON."""
    return {
        "queued": rooms.admission.queued(),
        "rooms": {phase: rooms.registry.phases[RoomPhase(phase)] for phase in PHASES},
        "kept": rooms.registry.known_count(),
        "ready": {side.value: rooms.registry.ready_count(side) for side in Side},
        "requests": requests(rooms, RECENT, "", failed=False),
        "failed": requests(rooms, FAILED, "", failed=True),
    }


def _worker(worker: Worker, rooms: RoomController, now_ms: int) -> dict[str, Any]:
    facts, census = worker.facts, rooms.history.censuses.get(worker.facts.incarnation)
    values = {} if census is None else census.values
    return {
        "name": facts.name,
        "side": facts.side.value,
        "state": worker.state.value,
        "process": None if facts.other_side is None else facts.other_side.process,
        "weight": None if facts.other_side is None else worker.weight,
        "incarnation": str(facts.incarnation),
        "address": facts.address,
        "topology": f"tp{facts.topology.tensor}pp{facts.topology.pipeline}",
        "ranks": facts.topology.ranks,
        "lease_left_ms": max(worker.lease_until_ms - now_ms, 0),
        "rooms": worker.client_rooms + worker.other_rooms,
        "rooms_max": facts.rooms_max,
        "tokens": worker.tokens,
        "tokens_max": facts.tokens_max,
        "load": _load(worker, now_ms),
        "told_ms_ago": None if census is None else now_ms - census.at_ms,
        "tokens_s": 0.0 if census is None else round(census.tokens_s, 1),
        "queues": _ordered(values.get("queues", {})),
        "phases": values.get("rooms", {}),
        "pages": values.get("pages", {}),
        "slots": values.get("slots", {}),
    }


def _load(worker: Worker, now_ms: int) -> dict[str, int | None] | None:
    """Return the load that a worker reported, as JSON; None if it has not reported any."""
    usage, queue = worker.usage, worker.queue
    if queue.load is not None:
        return {
            "tokens_waiting": queue.load.tokens_waiting,
            "tokens_per_s": queue.load.tokens_per_s,
            "left_ms": queue.left_ms(now_ms),
            "placed_since": len(queue.unreported),
        }
    if usage.load is None:
        return None
    return {
        "left_tokens": usage.left,
        "running": usage.load.running,
        "running_max": usage.load.running_max,
        "waiting": usage.load.waiting,
        "placed_since": len(usage.unreported),
    }


def _ordered(queues: Mapping[str, int]) -> dict[str, int]:
    known = [name.value for name in RoomQueue if name in queues]
    return {name: queues[name] for name in (*known, *(set(queues) - set(known)))}


def _lost(lost: LostWorker) -> dict[str, Any]:
    return {
        "name": lost.facts.name,
        "side": lost.facts.side.value,
        "incarnation": str(lost.facts.incarnation),
        "why": lost.why,
        "wall_ms": lost.wall_ms,
        "rooms": lost.rooms,
    }


def _summary(chain: Chain, rooms: RoomController) -> Summary:
    last = chain[-1]
    state = state_of(chain, retrying=last.id in rooms.admission.retrying)
    own = [event for entry in chain for event in entry.events if event.source == BOOTSTRAP]
    begun = min((event.wall_ms for event in own), default=rooms.clock.wall_ms())
    first = next((event.wall_ms for event in own if event.name == Moment.FIRST_TOKEN_PASSED_ON), None)
    end = last_word(event for event in last.events if event.source == BOOTSTRAP) if state in OVER else None
    cause = None if state is State.PAUSED else cause_of(state, last)
    return Summary(
        request_id=last.request_id,
        room=str(last.id),
        rooms=len(chain),
        state=state,
        begun_wall_ms=begun,
        total_ms=max((rooms.clock.wall_ms() if end is None else end.wall_ms) - begun, 0),
        first_token_ms=None if first is None else first - begun,
        prefill=last.names.get(Side.PREFILL, ""),
        decode=last.decode.name,
        same_process=last.is_same_process,
        reason="" if cause is None else cause.reason,
        cause="" if cause is None else cause.text,
    )


def _refused(refused: RefusedRequest) -> Summary:
    state = State.GONE if refused.status == CLIENT_GONE else State.REFUSED
    begun = refused.wall_ms - refused.waited_ms
    reason = "" if refused.status == NO_STATUS else str(refused.status)
    return _roomless(refused.request_id, state, begun, refused.waited_ms, reason, refused.why)


def _waiting(request_id: str, rooms: RoomController, since_wall_ms: int) -> Summary:
    waited_ms = max(rooms.clock.wall_ms() - since_wall_ms, 0)
    return _roomless(request_id, State.QUEUED, since_wall_ms, waited_ms, "", "")


def _roomless(
    request_id: str, state: State, begun_wall_ms: int, total_ms: int, reason: str, cause: str
) -> Summary:
    return Summary(request_id, "", 0, state, begun_wall_ms, total_ms, None, "", "", False, reason, cause)
