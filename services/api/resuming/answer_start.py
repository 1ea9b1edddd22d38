"""Values that an answer begins with: drawn for a new request, or taken from the id of an event.

A new request gets a random nonce and the present time. A resumed one gets those of the stream that it
continues. So both draw the same seeds and the same ids.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.api.resuming.drawn_values import NONCE_BYTES, DrawnValues
from baton.api.resuming.event_ids import EventIds, EventIdSigner
from baton.api.resuming.last_event_id import check_engine, last_event, refused
from baton.api.resuming.stream_identity import StreamIdentity
from baton.api.resuming.stream_position import StreamPosition


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """Values that one answer begins with."""

    request_id: str
    has_drawn_id: bool
    """Whether the router drew the request id. Otherwise the client chose it."""
    created_s: int
    """Time at which the answer was begun, seconds since the epoch."""
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    resumed: tuple[StreamIdentity, StreamPosition] | None = None
    """The stream that is continued, and the position behind which it is. None for a new request."""

    @property
    def position(self) -> StreamPosition | None:
        return None if self.resumed is None else self.resumed[1]

    @property
    def has_ended(self) -> bool:
        """Whether the client already has the whole stream that it continues."""
        return self.position is not None and self.position.is_end

    @property
    def max_tokens(self) -> Sequence[int] | None:
        """Most output tokens of each choice, by prompt, of the stream that is continued. None for a new
        request."""
        return None if self.resumed is None else self.resumed[0].max_tokens


class AnswerStarts:
    """Source of the starts of answers, and of the ids of their events, for one application."""

    def __init__(self, key: bytes, model: bytes) -> None:
        """Set the key and the model. `key`: secret that all routers of a stack share. `model`: digest of the
        model and of what renders its answers."""
        self._signer = EventIdSigner(key)
        self._model = model

    def resume(
        self, headers: Mapping[str, str], route: str, body: bytes, *, streams: bool
    ) -> AnswerStart | None:
        """Return the start of the stream that a request continues, or None for a new request.

        `headers`: request headers, by name in lower case. `route`: path template. `body`: digest of the body.
        `streams`: whether the request asks for a stream. Raises ApiError.
        """
        found = last_event(headers, self._signer, route, body, self._model, streams=streams)
        if found is None:
            return None
        own = found[0]
        return AnswerStart(own.request_id, own.has_drawn_id, own.created_s, own.nonce, found)

    def values(self, start: AnswerStart) -> DrawnValues:
        return self._signer.values(start.request_id, start.nonce)

    def ids(
        self,
        start: AnswerStart,
        route: str,
        body: bytes,
        engine: bytes,
        max_tokens: Sequence[int],
        choices: int,
    ) -> EventIds:
        """Return the ids of a stream's events. Raises ApiError if the stream cannot be continued here.

        `engine`: digest of the workers' engine. `max_tokens`: most output tokens of each choice, by prompt.
        `choices`: number of choices of all prompts.
        """
        if start.resumed is not None:
            identity, position = start.resumed
            check_engine(identity, engine)
            if len(position.choices) != choices:
                raise refused("it names another number of choices")
            return self._signer.issue(identity, choices, position)
        return self._signer.issue(
            StreamIdentity(
                route,
                start.request_id,
                start.has_drawn_id,
                start.nonce,
                start.created_s,
                body,
                self._model,
                engine,
                tuple(max_tokens),
            ),
            choices,
        )
