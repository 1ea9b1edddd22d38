"""Look-up of a request's timeline by the id of the request, of its response or of a room."""

from baton.bootstrap.room_controller import RoomController
from baton.bootstrap.timeline.request_timeline import build_timeline, of_queued, of_refused
from baton.bootstrap.timeline.retry_chains import PREFIX, RetryChains
from baton.bootstrap.timeline.timeline_schema import RequestTimeline
from baton.fleet.room_index import is_of
from baton.rooms.timeline import Moment


def find_timeline(rooms: RoomController, id_: str) -> RequestTimeline | None:
    """Return the timeline of a request of this bootstrap, or None if it knows none with this id."""
    chain, others = RetryChains(rooms.registry).find(id_)
    if chain:
        retrying = chain[-1].id in rooms.admission.retrying
        return build_timeline(chain, others, rooms.timelines.line(Moment.ASKED), retrying=retrying)
    for name in (id_, PREFIX.sub("", id_, count=1)):
        queued = next((each for each in rooms.admission.waiting() if is_of(each[0], name)), None)
        if queued is not None:
            return of_queued(*queued, rooms.timelines.line(Moment.ASKED))
        refused = rooms.history.refusal(name)
        if refused is not None:
            return of_refused(refused)
    return None
