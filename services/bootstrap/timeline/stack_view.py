"""Pages for operators over all bootstraps of the stack: this one's own requests, and what the others have.

Requests, queues and timelines are each bootstrap's own. Workers are the stack's, as this bootstrap sees them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from baton.bootstrap.peer_bootstraps import PeerBootstraps, PeerPages, unreadable
from baton.bootstrap.room_controller import RoomController
from baton.bootstrap.timeline import live_view
from baton.bootstrap.timeline.live_view import FAILED, PHASES, RECENT, Summary
from baton.bootstrap.timeline.request_lookup import find_timeline
from baton.bootstrap.timeline.timeline_schema import RequestTimeline
from baton.rooms.phases import Side
from baton.wire.baton.v1.bootstraps_pb2 import GetPageRequest, RequestsPage, SummaryPage

Page = Mapping[str, Any]
SIDES: Final = tuple(side.value for side in Side)


@dataclass(frozen=True, slots=True)
class FoundTimeline:
    """Result of the search for a request at all bootstraps."""

    timeline: RequestTimeline | Page | None
    """Timeline of the request, or None if no bootstrap that answered knows it."""
    bootstraps: Sequence[str] = ()
    """Addresses of the other bootstraps that answered."""
    unanswered: Sequence[str] = ()
    """Sentences that say which other bootstraps did not answer."""


class StackView:
    """Pages that a bootstrap makes of what it has itself, and of what the others have."""

    def __init__(self, rooms: RoomController, peers: PeerBootstraps) -> None:
        self._rooms = rooms
        self._peers = peers

    async def live(self) -> Page:
        """Return the workers, a row for each bootstrap, and the newest requests of all of them."""
        answers = await self._peers.read(GetPageRequest(summary=SummaryPage()))
        own = live_view.summary(self._rooms)
        others, unanswered = _readable(answers, _read_summary)
        rows = [_row(self._peers.own_address, own), *(_row(*each) for each in others.items())]
        return {
            "wall_ms": self._rooms.clock.wall_ms(),
            "model": self._rooms.registry.model.fingerprint,
            "queued": sum(row["queued"] for row in rows),
            "rooms": {phase: sum(row["rooms"][phase] for row in rows) for phase in PHASES},
            "kept": sum(row["kept"] for row in rows),
            "bootstraps": rows,
            "unanswered": unanswered,
            **live_view.workers(self._rooms),
            "requests": _merged(own["requests"], others, "requests", RECENT),
            "failed": _merged(own["failed"], others, "failed", FAILED),
        }

    async def requests(self, limit: int, search: str, *, failed: bool) -> Page:
        """Return the newest requests of all bootstraps: those with `search` in their ids, or that failed."""
        page = RequestsPage(search=search, failed=failed, limit=limit)
        answers = await self._peers.read(GetPageRequest(requests=page))
        own = live_view.requests(self._rooms, limit, search, failed=failed)
        others, unanswered = _readable(answers, _read_requests)
        return {"requests": _merged(own, others, "requests", limit), "unanswered": unanswered}

    async def find_timeline(self, id_: str) -> FoundTimeline:
        """Return the timeline of the request with this id. The other bootstraps are called only if this one
        does not know it. If several of them know it, the newest timeline is returned."""
        own = find_timeline(self._rooms, id_)
        if own is not None:
            return FoundTimeline(own)
        answers = await self._peers.read(GetPageRequest(timeline=id_))
        pages, unanswered = _readable(answers, _read_timeline)
        known = [address for address, page in pages.items() if page]
        if not known:
            return FoundTimeline(None, [*pages], unanswered)
        newest = max(known, key=lambda address: int(pages[address]["begun_wall_ms"]))
        timeline = {**pages[newest], "bootstrap": newest, "unanswered": unanswered}
        return FoundTimeline(timeline, [*pages], unanswered)


def _row(address: str, summary: Page) -> Page:
    return {"address": address} | {name: summary[name] for name in ("queued", "rooms", "kept", "ready")}


def _merged(own: Sequence[Summary], others: Mapping[str, Page], name: str, limit: int) -> list[Page]:
    """Return the newest of this bootstrap's requests and of those that the others have under `name`, each
    with the address of its bootstrap. It is empty for this one."""
    found: list[Page] = [asdict(each) | {"bootstrap": ""} for each in own]
    for address, page in others.items():
        found += [{**each, "bootstrap": address} for each in page[name]]
    return sorted(found, key=lambda each: int(each["begun_wall_ms"]), reverse=True)[:limit]


def _readable(answers: PeerPages, read: Callable[[Page], Page]) -> tuple[dict[str, Page], list[str]]:
    """Return the pages that `read` can read, by address, and sentences about all other bootstraps."""
    found: dict[str, Page] = {}
    unanswered = [*answers.unanswered]
    for address, page in answers.pages.items():
        try:
            found[address] = read(page)
        except (KeyError, TypeError, ValueError):
            unanswered.append(unreadable(address))
    return found, unanswered


def _read_summary(page: Page) -> Page:
    """Return a summary whose parts have the types of this version. Raises KeyError, TypeError or ValueError,
    as the next ones do."""
    return {
        "queued": int(page["queued"]),
        "rooms": {phase: int(page["rooms"][phase]) for phase in PHASES},
        "kept": int(page["kept"]),
        "ready": {side: int(page["ready"][side]) for side in SIDES},
        "requests": _read_rows(page["requests"]),
        "failed": _read_rows(page["failed"]),
    }


def _read_requests(page: Page) -> Page:
    return {"requests": _read_rows(page["requests"])}


def _read_rows(rows: Sequence[Page]) -> list[Page]:
    return [{**each, "begun_wall_ms": int(each["begun_wall_ms"])} for each in rows]


def _read_timeline(page: Page) -> Page:
    return {**page, "begun_wall_ms": int(page["begun_wall_ms"])} if page else {}
