"""What does a decode rank keep of a room?"""

from dataclasses import dataclass, field

from baton.ids import PageCounts, PageTables, RoomId
from baton.pages.record import MetadataRecord
from baton.rooms.choice_pages import ChoicePages
from baton.rooms.errors import Cause
from baton.rooms.page_growth import Age
from baton.rooms.phases import Phase
from baton.rooms.receiver import Receiver
from baton.rooms.request import Request, Token
from baton.rooms.running_choices import RunningChoices


@dataclass(slots=True, eq=False)
class ReceivingRoom(Receiver):
    """A shell's record adds its own to it."""

    request: Request = field(kw_only=True)
    peer_name: str = field(default="", kw_only=True)
    division: ChoicePages = field(kw_only=True)
    """Of its pages, among the choices."""
    pages: list[PageTables] = field(default_factory=list, init=False)
    """Of each choice, once it was granted: its page tables, by group."""
    covered: list[int] = field(init=False)
    """Of each choice: leading positions that its pages are there for, once it was granted."""
    filled: list[int] = field(default_factory=list, init=False)
    """Of each choice, once it was admitted: leading positions whose keys and values are those of its tokens.
    Its next row begins there. What drafts that were not taken left lies behind them, and is written over
    before it is read (`not-taken-never-read`)."""
    retracting: Cause | None = field(default=None, init=False)
    """Why every rank takes its pages for others, from its next turn on: no row of it is computed any more.
    Whatever else ends it by then is more (`retracted-is-no-failure`)."""
    prefix_tokens: int = field(default=0, init=False)
    """Leading tokens whose pages were held when it was granted."""
    computed: int = field(default=0, init=False)
    """Of a local room: leading tokens whose KV is in its pages."""
    first: Token | None = field(default=None, init=False)
    """Drawn behind what it begins with, by the sender or here."""
    record: MetadataRecord | None = field(default=None, init=False)
    """As it was when its seal was seen: what a peer writes to the slot later is not looked at."""
    near_until_s: float | None = field(default=None, init=False)
    """Until when its seal is looked for without a pause, once its record is there."""
    outputs: tuple[list[int], ...] = field(init=False)
    """All tokens drawn of each choice."""
    ends: RunningChoices = field(init=False)
    concluded: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.outputs = tuple(list(self.request.output) for _ in range(self.request.choices))
        self.ends = RunningChoices(self.request.choices)
        self.covered = self.division.begun

    @property
    def written(self) -> tuple[int, ...]:
        """All tokens of choice 0 whose KV is in the pages: the last one drawn was not computed."""
        return (*self.request.prompt, *self.outputs[0][:-1])

    @property
    def computable(self) -> bool:
        return self.phase is Phase.COMPUTING and not self.complete and self.cause is None

    @property
    def complete(self) -> bool:
        """Of a local room: all that is known was computed."""
        return self.computed == self.request.prefill_tokens

    @property
    def cached(self) -> int:
        return self.prefix_tokens

    @property
    def runs(self) -> bool:
        """Its choices that go on have their next tokens drawn."""
        if self.phase is not Phase.SUCCESS:
            return False
        return not (self.finished or self.stopping or self.retracting is not None)

    @property
    def needs_short_steps(self) -> bool:
        """By each step that takes longer: it runs, or is about to."""
        return self.runs or self.phase is Phase.TRANSFERRING

    def ending(self, now_ms: int) -> Cause | None:
        return Receiver.ending(self, now_ms) or self.retracting

    @property
    def urgency(self) -> tuple[int, int, RoomId]:
        return self.request.priority, self.request.arrived_ms, self.id

    @property
    def age(self) -> Age:
        return self.request.arrived_ms, self.id

    @property
    def succeeded(self) -> bool:
        """Whatever happens now, its caller has its answer."""
        return self.finished

    @property
    def undecided(self) -> bool:
        """What landed is neither proven nor found wrong."""
        return self.phase is Phase.TRANSFERRING and not self.sealed and self.cause is None

    def tables(self, choice: int) -> PageTables:
        """The page tables of one choice, by group."""
        return self.pages[choice]

    @property
    def growing(self) -> int:
        """Choices that have no pages for all that they may come to hold, once it was granted."""
        return sum(covered < self.division.tokens_max for covered in self.covered)

    @property
    def margin(self) -> PageCounts:
        """A block for each choice that grows."""
        growing = self.growing
        return tuple([growing * count for count in self.division.block])

    @property
    def rows(self) -> int:
        return self.request.choices

    @property
    def stays(self) -> bool:
        """Another room could not go on behind what it has."""
        most = self.request.carried_tokens_max
        return 0 < most < len(self.request.prompt) + max(map(len, self.outputs))

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV its pages hold, once it was admitted: what all choices begin with, and what was
        drawn of each but the last."""
        begun = len(self.request.output)
        drawn = sum(max(len(output) - begun - 1, 0) for output in self.outputs)
        return self.request.prefill_tokens + drawn
