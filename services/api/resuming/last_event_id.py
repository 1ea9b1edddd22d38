"""Reading of the header `Last-Event-ID`, by which a client continues a stream."""

from collections.abc import Mapping
from typing import Final

from baton.api.errors import ApiError, invalid
from baton.api.resuming.event_ids import EventIdSigner
from baton.api.resuming.stream_identity import UNKNOWN_ENGINE, StreamIdentity
from baton.api.resuming.stream_position import StreamPosition

HEADER: Final = "Last-Event-ID"
NAME: Final = HEADER.lower()


def last_event(
    headers: Mapping[str, str], signer: EventIdSigner, route: str, body: bytes, model: bytes, *, streams: bool
) -> tuple[StreamIdentity, StreamPosition] | None:
    """Return the stream and the position that the header names, or None without the header.

    `headers`: request headers, by name in lower case. `route`: path template of the request's route. `body`,
    `model`: digests of its body and of the served model. `streams`: whether the request asks for a stream.
    Raises ApiError for an id that does not belong to this request.
    """
    given = headers.get(NAME, "").strip()
    if not given:
        return None
    if not streams:
        raise refused("only a stream is resumed, and the body does not ask for one")
    found = signer.read(given)
    if found is None:
        raise refused("this stack did not issue the id, or it was changed", "unknown_event_id")
    identity = found[0]
    if identity.route != route:
        raise refused(f"it is the id of a stream of {identity.route}")
    if identity.body != body:
        raise refused("it is the id of a stream with another body; send the same bytes again")
    if identity.model != model:
        why = "another model is served now, or it is served with other settings; send a new request"
        raise refused(why, "model_changed")
    return found


def check_engine(identity: StreamIdentity, engine: bytes) -> None:
    """Raise ApiError if the workers compute by another engine than when the stream began. An engine that was
    not known then, or is not known now, is not compared."""
    if UNKNOWN_ENGINE not in (engine, identity.engine) and engine != identity.engine:
        raise refused("the workers compute with another engine now; send a new request", "model_changed")


def differing_answer() -> ApiError:
    """Return the error for an answer that was computed again with another result than the client has."""
    why = "the answer was computed again, and differs from what the stream showed; send a new request"
    return refused(why, "answer_differs")


def refused(why: str, code: str = "invalid_value") -> ApiError:
    return invalid(HEADER, f"'{HEADER}': {why}.", code)
