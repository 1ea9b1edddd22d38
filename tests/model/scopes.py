"""How large a world is explored?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from services.topology import Topology

_ONE: Final = Topology()
_TP2: Final = Topology(tensor=2)
_TP3: Final = Topology(tensor=3)
_PP2: Final = Topology(pipeline=2)


@dataclass(frozen=True, slots=True)
class Budget:
    """How often each kind of trouble may strike, over all rooms. Bounded, so that the world is finite."""

    aborts: int = 0
    """The client hangs up."""
    silences: int = 0
    """A prefill worker's lease runs out while it lives on: its rooms fail, and nothing is proven."""
    losses: int = 0
    """A control message is lost."""
    repeats: int = 0
    """A control message arrives twice."""
    failures: int = 0
    """One rank alone sees a failure, of a room that it holds or held; or one write fails."""
    rumours: int = 0
    """One rank hears of a failure of a room that has not come to it yet."""
    expiries: int = 0
    """A deadline passes on one rank while things still move. (When nothing moves it always can.)"""
    sender_deaths: int = 0
    receiver_deaths: int = 0
    """A worker dies and another incarnation takes its place."""
    stalls: int = 0
    """A prefill worker stops, answers nothing and never dies; it may go on at any later time. What it
    posted lands all the same."""
    revocations: int = 0
    """A room's proof is overdue while things still move. (When nothing moves it always can be.)"""
    orphans: int = 0
    """Whoever opened a room goes away without a word."""
    drains: int = 0
    """A worker is asked to finish its rooms and to leave; another takes its place."""
    forgets: int = 0
    """What a worker remembers of rooms that it does not hold expires."""
    lags: int = 0
    """One rank does what was agreed in a turn only after the others of its worker have, and their leader may
    have told of it."""
    strays: int = 0
    """A connect arrives that nobody waits for any more: it tells where the memory was before it was taken
    back the last time, and is refused where that is known."""
    ends: int = 0
    """The reader of one choice has all it wants, and the others go on."""
    misconnects: int = 0
    """One prefill rank cannot reach the receiver's memory (yet)."""


@dataclass(frozen=True, slots=True)
class Scope:
    name: str
    tells: str
    """What is explored, in a line."""
    senders: Topology = _ONE
    receivers: Topology = _ONE
    """The ranks of either side: who writes what to whom follows from these."""
    kv_heads: int = 0
    """Of the model. 0: one for each tensor rank of the larger side; fewer are held by several ranks each."""
    rooms: int = 2
    prompt_pages: int = 1
    """Pages of a prompt: what is pushed. 0: the receiver holds them all already."""
    more_pages: int = 0
    """Pages that the receiver reserves beside them, for tokens still to be drawn."""
    pages: int = 1
    """Of each receiver rank."""
    slots: int = 1
    """Of each receiver rank."""
    sender_pages: int = 2
    sums: bool = False
    """The receiver's ranks are told different checksums, so that each gets a record of its own."""
    overlap: bool = False
    """Rooms run beside each other. False: each is issued when the outcome of the one before is known, as
    its retry, while the workers may still hold what that one held."""
    ways: bool = False
    """Connecting is a message, a way breaks with a write that fails, and ranks are told apart: the leader
    answers. False: whatever is granted can be reached."""
    registry: bool = False
    """The bootstrap's own tables take part, and workers report what they gave back. False: it knows what
    every room came to, and no more."""
    steps: bool = False
    """A step of either engine takes time, and may run while its room ends. False: it ends in its turn."""
    receiver_steps: bool = False
    """The same of the receiver's engine alone."""
    tokens: int = 1
    """Steps of the receiver's engine until a sequence ends; of every other choice, one more."""
    choices: int = 1
    """Of a room. Where there are several, prompt and answer have a token a page."""
    late_records: bool = True
    """A record may land at any time after it was posted, as every other write. False: it has landed before
    anything else happens."""
    budget: Budget = Budget()
    depth: int | None = None
    """Explore so many events deep only."""
    quick: bool = True
    """Small enough to run with every change."""
    long: bool = False
    """Too large for `make verify`."""

    @property
    def drains_only(self) -> bool:
        """Whoever leaves was asked to."""
        budget = self.budget
        others = (budget.silences, budget.stalls, budget.sender_deaths, budget.receiver_deaths)
        return bool(budget.drains) and not any(others)


_ALL: Final = (
    Scope(
        "calm",
        "no trouble; two ranks a side, a slot used by one room after the other",
        senders=_TP2,
        receivers=_TP2,
    ),
    Scope(
        "pages",
        "two pages a prompt and one to grow into, a second slot",
        prompt_pages=2,
        more_pages=1,
        pages=3,
        slots=2,
        rooms=1,
        budget=Budget(aborts=1),
    ),
    Scope(
        "zero-pages",
        "nothing to push: the record alone",
        senders=_TP2,
        receivers=_TP2,
        rooms=1,
        prompt_pages=0,
        budget=Budget(aborts=1, expiries=1),
    ),
    Scope(
        "abort",
        "the client hangs up; the slot and the page are used again",
        budget=Budget(aborts=1, expiries=1),
    ),
    Scope(
        "ranks-differ",
        "two ranks a side; one sees a failure, a message comes twice",
        senders=_TP2,
        receivers=_TP2,
        rooms=1,
        late_records=False,
        budget=Budget(aborts=1, failures=1, repeats=1),
    ),
    Scope(
        "losses", "messages are lost and come twice", rooms=1, budget=Budget(aborts=1, losses=2, repeats=1)
    ),
    Scope("silence", "a sender is given up for lost, and lives on", budget=Budget(silences=1)),
    Scope("rumours", "news of a room that has not come", rooms=1, budget=Budget(aborts=1, rumours=2)),
    Scope(
        "steps",
        "steps of the engines run on while rooms end",
        senders=_TP2,
        receivers=_TP2,
        rooms=1,
        steps=True,
        late_records=False,
        budget=Budget(aborts=1, failures=1),
    ),
    Scope(
        "overlap",
        "two rooms beside each other want one slot",
        overlap=True,
        budget=Budget(aborts=1),
        quick=False,
    ),
    Scope("sender-death", "a prefill worker dies and comes back", budget=Budget(sender_deaths=1, silences=1)),
    Scope(
        "receiver-death",
        "a decode worker dies and comes back",
        budget=Budget(receiver_deaths=1),
        quick=False,
    ),
    Scope(
        "revocation",
        "a silent sender's memory is taken back; its writes and grants come late",
        rooms=2,
        ways=True,
        budget=Budget(stalls=1),
    ),
    Scope(
        "revocation-early",
        "memory is taken back while things still move; ways break",
        rooms=1,
        ways=True,
        budget=Budget(aborts=1, revocations=1, failures=1),
    ),
    Scope(
        "revocation-strays",
        "the same beside a connect that comes when the memory that it tells of was taken back",
        rooms=1,
        ways=True,
        budget=Budget(aborts=1, revocations=1, failures=1, strays=1),
    ),
    Scope(
        "revocation-ranks",
        "two ranks a side, whose engines run on while memory is to be taken back",
        senders=_TP2,
        receivers=_TP2,
        rooms=1,
        ways=True,
        steps=True,
        late_records=False,
        budget=Budget(stalls=1),
    ),
    Scope(
        "revocation-steps",
        "a room decodes while the memory of the one before it is to be taken back",
        prompt_pages=0,
        receiver_steps=True,
        tokens=2,
        pages=2,
        slots=2,
        budget=Budget(revocations=1),
        quick=False,
    ),
    Scope(
        "revocation-steps-abort",
        "the same beside a client that hangs up",
        prompt_pages=0,
        receiver_steps=True,
        tokens=2,
        pages=2,
        slots=2,
        budget=Budget(revocations=1, aborts=1),
        quick=False,
    ),
    Scope(
        "choices",
        "a room of three choices, whose steps end one by one on two ranks; a reader has enough of one",
        receivers=_TP2,
        kv_heads=1,
        rooms=1,
        prompt_pages=2,
        more_pages=1,
        pages=7,
        choices=3,
        receiver_steps=True,
        late_records=False,
        budget=Budget(aborts=1, failures=1, ends=1),
    ),
    Scope(
        "choices-death",
        "the same beside a sender's death and memory that is taken back",
        receivers=_TP2,
        kv_heads=1,
        rooms=1,
        prompt_pages=2,
        more_pages=1,
        pages=7,
        choices=3,
        receiver_steps=True,
        late_records=False,
        budget=Budget(ends=1, sender_deaths=1, revocations=1),
        quick=False,
    ),
    Scope(
        "orphans",
        "who opened a room is gone; reports are lost and come twice; a lease runs out",
        rooms=1,
        registry=True,
        budget=Budget(orphans=1, losses=1, repeats=1, silences=1),
    ),
    Scope(
        "draining",
        "a worker is asked to leave while rooms run",
        registry=True,
        budget=Budget(drains=1),
    ),
    Scope(
        "forgotten",
        "what is remembered of a room expires before the last that is said of it arrives",
        rooms=1,
        budget=Budget(aborts=1, repeats=1, forgets=1, failures=1),
    ),
    Scope(
        "pipeline",
        "two pipeline ranks write to one; the client hangs up, one rank sees a failure",
        senders=_PP2,
        rooms=1,
        budget=Budget(aborts=1, failures=1, expiries=1),
    ),
    Scope(
        "pipeline-rooms",
        "two pipeline ranks write two rooms, one after the other, to one slot of one rank; late writes",
        senders=_PP2,
        late_records=False,
        budget=Budget(aborts=1, failures=1),
        quick=False,
    ),
    Scope(
        "pipeline-death",
        "the same beside a sender's death and a message that is lost",
        senders=_PP2,
        late_records=False,
        budget=Budget(sender_deaths=1, losses=1),
        quick=False,
    ),
    Scope(
        "pipeline-tensor",
        "each of two pipeline ranks writes to both tensor ranks of the receiver",
        senders=_PP2,
        receivers=_TP2,
        rooms=1,
        late_records=False,
        budget=Budget(aborts=1, failures=1),
    ),
    Scope(
        "join",
        "two tensor ranks write to one",
        senders=_TP2,
        rooms=1,
        budget=Budget(aborts=1, failures=1),
    ),
    Scope(
        "split",
        "one rank writes to two tensor ranks, each of which gets a record of its own",
        receivers=_TP2,
        rooms=1,
        sums=True,
        budget=Budget(aborts=1, failures=1),
    ),
    Scope(
        "replicated",
        "three ranks hold one head: two send it, to a rank of the receiver each, one has nothing to send",
        senders=_TP3,
        receivers=_TP2,
        kv_heads=1,
        rooms=1,
        budget=Budget(aborts=1),
    ),
    Scope(
        "connects",
        "a rank of two does not reach the receiver's memory at first; ways break",
        senders=_TP2,
        receivers=_TP2,
        rooms=1,
        ways=True,
        budget=Budget(misconnects=1, failures=1),
    ),
    Scope(
        "reconnects",
        "a write fails and breaks its way, and the next room, of which no page is sent, connects anew",
        prompt_pages=0,
        ways=True,
        budget=Budget(failures=1),
    ),
    Scope(
        "lags",
        "one of two ranks is late to do what was agreed; the client hangs up",
        senders=_TP2,
        receivers=_TP2,
        rooms=1,
        budget=Budget(lags=1, aborts=1),
    ),
    Scope(
        "lags-rooms",
        "the same without an abort, and the slot is used again",
        senders=_TP2,
        receivers=_TP2,
        late_records=False,
        budget=Budget(lags=1),
        quick=False,
    ),
    Scope(
        "lags-revocation",
        "one of two ranks is late, and memory is taken back while things still move",
        senders=_TP2,
        receivers=_TP2,
        rooms=1,
        ways=True,
        late_records=False,
        budget=Budget(lags=1, revocations=1, aborts=1),
        quick=False,
    ),
    Scope(
        "two-by-two",
        "two ranks a side, two rooms in one slot, an abort and a fault",
        senders=_TP2,
        receivers=_TP2,
        late_records=False,
        budget=Budget(aborts=1, failures=1),
        quick=False,
    ),
    Scope(
        "two-by-two-death",
        "the same beside a sender's death and a message that comes twice",
        senders=_TP2,
        receivers=_TP2,
        late_records=False,
        budget=Budget(aborts=1, repeats=1, sender_deaths=1),
        quick=False,
    ),
    Scope(
        "two-by-two-overlap",
        "two ranks a side, two rooms beside each other, to a stated depth",
        senders=_TP2,
        receivers=_TP2,
        overlap=True,
        late_records=False,
        budget=Budget(aborts=1, failures=1),
        depth=20,
        quick=False,
        long=True,
    ),
    Scope(
        "everything",
        "one rank a side, nearly every kind of trouble once",
        budget=Budget(
            aborts=1,
            silences=1,
            losses=1,
            repeats=1,
            failures=1,
            rumours=1,
            expiries=1,
            sender_deaths=1,
            receiver_deaths=1,
        ),
        rooms=1,
        steps=True,
        quick=False,
        long=True,
    ),
    Scope(
        "three-rooms",
        "a room, its retry and another, in one slot",
        rooms=3,
        budget=Budget(aborts=1),
        quick=False,
        long=True,
    ),
    Scope(
        "retries",
        "a room, and its retry as a new one, in the registry's tables",
        registry=True,
        budget=Budget(aborts=1, expiries=1),
        quick=False,
        long=True,
    ),
    Scope(
        "revocation-two",
        "two ranks a side, two rooms in one slot, a silent sender that may wake, to a stated depth",
        senders=_TP2,
        receivers=_TP2,
        ways=True,
        late_records=False,
        budget=Budget(stalls=1),
        depth=24,
        quick=False,
        long=True,
    ),
    Scope(
        "revocation-all",
        "the same on one rank beside an abort, a failure, a loss, and memory taken back early",
        ways=True,
        budget=Budget(aborts=1, stalls=1, revocations=1, failures=1, losses=1),
        rooms=1,
        quick=False,
    ),
    Scope(
        "three-ranks",
        "three ranks a side, one of which sees a failure",
        senders=_TP3,
        receivers=_TP3,
        rooms=1,
        late_records=False,
        budget=Budget(aborts=1, failures=1),
        quick=False,
    ),
)

SCOPES: Final[Mapping[str, Scope]] = {scope.name: scope for scope in _ALL}
