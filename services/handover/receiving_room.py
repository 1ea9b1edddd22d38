"""Record of one room on a rank of a decode worker."""

from dataclasses import dataclass, field

from baton.ids import PageCounts, PageTables, RoomId
from baton.pages.record import MetadataRecord
from baton.rooms.choice_pages import ChoicePages
from baton.rooms.errors import Cause
from baton.rooms.phases import Phase
from baton.rooms.receiver import Receiver
from baton.rooms.request import Request, Token
from baton.rooms.retraction import Age
from baton.rooms.running_choices import RunningChoices


@dataclass(slots=True, eq=False)
class ReceivingRoom(Receiver):
    """Record of one room on a decode rank. The driver's record is a subclass with its own fields."""

    request: Request = field(kw_only=True)
    peer_name: str = field(default="", kw_only=True)
    division: ChoicePages = field(kw_only=True)
    """Numbers of the pages that the room's choices share, and of the pages that each choice has for
    itself."""
    pages: list[PageTables] = field(default_factory=list, init=False)
    """Page tables by choice index, each by KV group. Empty before the grant."""
    covered: list[int] = field(init=False)
    """Number of leading positions for which a choice has pages, by choice index. Valid once the room is
    granted."""
    filled: list[int] = field(default_factory=list, init=False)
    """Number of leading positions whose keys and values are computed, by choice index. Valid once admitted.

    The next row of a choice begins there. Values of rejected drafts lie after it, and are overwritten before
    they are read (`not-taken-never-read`).
    """
    retracting: Cause | None = field(default=None, init=False)
    """Cause of the room's retraction (preemption), or None. No row of a retracted room is computed any more,
    and its pages go to other rooms from the next turn on. Any other cause of an end takes precedence
    (`retracted-is-no-failure`)."""
    prefix_tokens: int = field(default=0, init=False)
    """Number of leading tokens whose pages were in this worker's prefix cache when the room was granted."""
    computed: int = field(default=0, init=False)
    """Number of leading tokens whose KV is in the pages. Used only if this worker computes the prompt
    itself."""
    first: Token | None = field(default=None, init=False)
    """First output token, sampled by the sender or by this worker. None until it is known."""
    record: MetadataRecord | None = field(default=None, init=False)
    """Metadata record of the room, as read together with its seal. None before that. Later writes of the peer
    to the slot are not read."""
    near_until_s: float | None = field(default=None, init=False)
    """Time until which the room's seal (the mark that all data is written) is polled without a pause, in
    seconds of the event loop's clock. Set when the record has arrived."""
    outputs: tuple[list[int], ...] = field(init=False)
    """Output token ids of each choice, by choice index."""
    ends: RunningChoices = field(init=False)
    concluded: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.outputs = tuple(list(self.request.output) for _ in range(self.request.choices))
        self.ends = RunningChoices(self.request.choices)
        self.covered = self.division.begun

    @property
    def written(self) -> tuple[int, ...]:
        """Token ids of choice 0 whose KV is in the room's pages: the prompt, and the output without its last
        token."""
        return (*self.request.prompt, *self.outputs[0][:-1])

    @property
    def computable(self) -> bool:
        return self.phase is Phase.COMPUTING and not self.complete and self.cause is None

    @property
    def complete(self) -> bool:
        """Whether this worker has computed the room's whole prompt itself. Used only if no prefill worker
        computes it."""
        return self.computed == self.request.prefill_tokens

    @property
    def cached(self) -> int:
        return self.prefix_tokens

    @property
    def runs(self) -> bool:
        """Whether the room is decoding now: in each step, a token is sampled for each of its unfinished
        choices."""
        if self.phase is not Phase.SUCCESS:
            return False
        return not (self.finished or self.stopping or self.retracting is not None)

    @property
    def needs_short_steps(self) -> bool:
        """Whether a long step would delay the room: it decodes, or its pages are in transfer."""
        return self.runs or self.phase is Phase.TRANSFERRING

    def ending(self, now_ms: int) -> Cause | None:
        return Receiver.ending(self, now_ms) or self.retracting

    @property
    def is_replayable(self) -> bool:
        return self.request.is_replayable

    @property
    def urgency(self) -> tuple[int, int, RoomId]:
        return self.request.priority, self.request.arrived_ms, self.id

    @property
    def age(self) -> Age:
        return self.request.arrived_ms, self.id

    @property
    def succeeded(self) -> bool:
        """Whether the caller has the whole response. A later failure does not change the outcome."""
        return self.finished

    @property
    def undecided(self) -> bool:
        """Whether the room's pages are in transfer, and it is not known yet whether they are complete and
        correct."""
        return self.phase is Phase.TRANSFERRING and not self.sealed and self.cause is None

    def tables(self, choice: int) -> PageTables:
        """Return the page tables of one choice, by KV group. A page table lists page ids in token order."""
        return self.pages[choice]

    @property
    def growing(self) -> int:
        """Number of choices whose pages do not yet cover their longest possible output. Valid once
        granted."""
        return sum(covered < self.division.tokens_max for covered in self.covered)

    @property
    def margin(self) -> PageCounts:
        """Number of free pages that new rooms must leave for this room's growth, by KV group: one block for
        each growing choice."""
        growing = self.growing
        return tuple([growing * count for count in self.division.block])

    @property
    def rows(self) -> int:
        return self.request.choices

    @property
    def stays(self) -> bool:
        """Whether the room must not be retracted (preempted), because its prompt and output are too long to
        be continued in another room."""
        most = self.request.carried_tokens_max
        return 0 < most < len(self.request.prompt) + max(map(len, self.outputs))

    @property
    def kv_tokens(self) -> int:
        """Number of tokens whose KV is in the room's pages, once admitted. The common prefix of all choices
        counts once, and the last output token of a choice does not count."""
        begun = len(self.request.output)
        drawn = sum(max(len(output) - begun - 1, 0) for output in self.outputs)
        return self.request.prefill_tokens + drawn
