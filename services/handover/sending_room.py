"""Record of one room on a rank of a prefill worker."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.handover.route import Route
from baton.ids import PageTables, RoomId
from baton.pages.record import ALTERNATIVES_MAX, MetadataRecord
from baton.rooms.phases import Phase
from baton.rooms.request import Request, Token
from baton.rooms.sender import Sender


@dataclass(slots=True, eq=False)
class SendingRoom(Sender):
    """Record of one room on a prefill rank. The driver's record is a subclass with its own fields."""

    request: Request = field(kw_only=True)
    peer_name: str = field(default="", kw_only=True)
    route: Route | None = field(default=None, init=False)
    """Route to the memory that the room's grant names. None before the grant."""
    pages: PageTables = field(default=(), init=False)
    """Page tables by KV group, in the order of the tokens. Empty before the pages are reserved."""
    begun: bool = field(default=False, init=False)
    """Whether the room's pages are reserved, so that its prompt may be computed and written to the
    receiver."""
    computed: int = field(default=0, init=False)
    """Number of the room's leading tokens whose KV is in its pages."""
    cached: int = field(default=0, init=False)
    """Number of the room's leading tokens whose KV came from the prefix cache when its pages were
    reserved."""
    restored: PageTables = field(default=(), init=False)
    """Pages of the cached state with which the computation begins, by KV group. () for none."""
    stored: Mapping[int, PageTables] | None = field(default=None, init=False)
    """Pages to which the states behind leading tokens are copied, by the number of these tokens. A chunk ends
    there. None before that is decided."""
    first: Token | None = field(default=None, init=False)
    likely_cached: int | None = field(default=None, init=False)
    """Number of the room's leading tokens that were found in the prefix cache before its pages were reserved.
    None before the look-up."""

    @property
    def complete(self) -> bool:
        """Whether all tokens of the prompt, and of the output that the room continues, were computed."""
        return self.computed == self.request.prefill_tokens

    @property
    def is_replayable(self) -> bool:
        return self.request.is_replayable

    @property
    def urgency(self) -> tuple[int, int, RoomId]:
        return self.request.priority, self.request.arrived_ms, self.id

    @property
    def reusable(self) -> tuple[int, ...]:
        """Leading tokens of the room whose KV it may take from the prefix cache, if cached.

        The last token is always computed, because the next token is sampled from it. A prompt that is scored
        is computed whole (`scored-is-computed`).
        """
        return self.request.tokens[:-1] if self.request.prompt_logprobs is None else ()

    @property
    def succeeded(self) -> bool:
        """Whether the hand-over of the room is complete. A later failure does not change the outcome."""
        return self.phase is Phase.SUCCESS

    @property
    def computable(self) -> bool:
        return self.phase is Phase.TRANSFERRING and not self.complete

    @property
    def record(self) -> MetadataRecord:
        """Metadata record for the receiver. Valid once the whole prompt is computed."""
        if self.first is None or self.grant is None:
            raise AssertionError(f"room {self.id} has a record before it was computed")
        return MetadataRecord(
            room=self.id,
            generation=self.grant.generation,
            prompt_tokens=self.request.prefill_tokens,
            cached_tokens=self.cached,
            pages=tuple(map(len, self.grant.pages)),
            first_token=self.first.id,
            first_logprob=self.first.logprob,
            # Only this side can report to the bootstrap what does not fit (`record-fits`).
            alternatives=self.first.top[:ALTERNATIVES_MAX],
        )
