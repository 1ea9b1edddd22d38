"""Scopes: how large a world is explored.

`scopes.txt` lists every one: what it explores, and behind its name the words of `Scope` and of `Budget`
that differ from what is usual.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from baton.topology import Topology

_ONE: Final = Topology()
_SPLITS: Final = {"tp2": Topology(tensor=2), "tp3": Topology(tensor=3), "pp2": Topology(pipeline=2)}


@dataclass(frozen=True, slots=True)
class Budget:
    """Most occurrences of each kind of trouble, over all rooms. Bounds keep the world finite."""

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
    """Number of rooms whose opener may disappear without a message."""
    opener_deaths: int = 0
    """The bootstrap that opened or adopted a room dies, and both workers see its streams break, in any
    order with all else. What it sent before may still arrive."""
    adoptions: int = 0
    """Another bootstrap adopts a room whose bootstrap has died."""
    drains: int = 0
    """A worker is asked to finish its rooms and to leave; another takes its place."""
    forgets: int = 0
    """Expiries of what a worker remembers of absent rooms."""
    lags: int = 0
    """One rank does what was agreed in a turn only after the others of its worker have, and their leader may
    have told of it."""
    strays: int = 0
    """A connect arrives that nobody waits for any more: it tells where the memory was before it was taken
    back the last time, and is refused where that is known."""
    ends: int = 0
    """The reader of one choice has all it wants, and the others go on."""
    claims: int = 0
    """The decode worker's leader decides that a room is computed there. It is told as any command is."""
    reports: int = 0
    """Somebody who did not start the prefill worker reports that its process exited. The process lives."""
    namesakes: int = 0
    """Another process registers by the prefill worker's name, once the worker's lease ran out, and then falls
    silent. The worker lives."""
    misconnects: int = 0
    """One prefill rank cannot reach the receiver's memory (yet)."""


TROUBLES: Final = tuple(field.name for field in fields(Budget))


@dataclass(frozen=True, slots=True)
class Scope:
    name: str
    tells: str
    """One line that says what is explored."""
    senders: Topology = _ONE
    receivers: Topology = _ONE
    """Topology of the receiver's ranks. Which rank writes what to which follows from both topologies."""
    kv_heads: int = 0
    """KV heads of the model. 0: one for each tensor rank of the larger side. Fewer heads are shared by
    several ranks."""
    rooms: int = 2
    prompt_pages: int = 1
    """Pages of a prompt: what is pushed. 0: the receiver holds them all already."""
    grows: bool = False
    """Whether drawn tokens have a page each at the receiver, where every step's reads and writes are
    checked. False: they lie in the prompt's last page."""
    timed: bool = False
    """The receiver is told when a request's time is over, which is never."""
    pages: int = 1
    """Number of pages of each receiver rank."""
    states: int = 0
    """Number of pages for states of each receiver rank. 0: no layer has a state."""
    slots: int = 1
    """Number of slots of each receiver rank."""
    sender_pages: int = 2
    sums: bool = False
    """Whether the receiver's ranks are told different checksums, so that each gets a record of its own."""
    begun: int = 0
    """Rooms that decode from the start on."""
    aged: bool = False
    """Whether each room's request is older than those of the rooms before it. False: equally old."""
    cached: bool = False
    """Whether the receiver caches what rooms computed, for prompts that differ."""
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
    """Whether a step of either engine takes time, and may run while its room ends. False: it ends in its
    turn."""
    receiver_steps: bool = False
    """Whether a step of the receiver's engine alone takes time, as with `steps`."""
    tokens: int = 1
    """Steps of the receiver's engine until a sequence ends; of every other choice, one more."""
    choices: int = 1
    """Choices of a room. With several, prompt and answer have one token a page."""
    drafts: int = 0
    """Most of a row, in a world that `grows`. How many of them are right depends on where they are."""
    early_records: bool = False
    """A record has landed before anything else happens. False: at any time after it was posted, as every
    other write."""
    budget: Budget = Budget()
    depth: int | None = None
    """Largest number of events in a row that are explored."""
    slow: bool = False
    """More than three seconds: for `make test-all`."""
    large: bool = False
    """Too large to run with every change."""
    long: bool = False
    """Whether the scope is too large for `make verify`."""

    @property
    def adopts(self) -> bool:
        """Whether rooms have bootstraps that may die, and others that may adopt them."""
        return bool(self.budget.opener_deaths)

    @property
    def quick(self) -> bool:
        return not self.large

    @property
    def drains_only(self) -> bool:
        """Return whether a worker leaves only after it was asked to drain."""
        budget = self.budget
        others = (budget.silences, budget.stalls, budget.sender_deaths, budget.receiver_deaths)
        return bool(budget.drains) and not any(others)


def _read(told: str) -> Scope:
    """`# what is explored`, and on the next line `name: word word=…`. A trouble without a number: once."""
    tells, line = told.strip().split("\n")
    name, _, words = line.partition(":")
    world: dict[str, Any] = {}
    budget: dict[str, int] = {}
    for word in words.split():
        key, _, value = word.partition("=")
        if key in TROUBLES:
            budget[key] = int(value or 1)
        else:
            world[key] = _SPLITS[value] if value in _SPLITS else int(value) if value else True
    return Scope(name, tells.removeprefix("# "), budget=Budget(**budget), **world)


_TOLD: Final = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
SCOPES: Final[Mapping[str, Scope]] = {scope.name: scope for scope in map(_read, _TOLD.split("\n\n"))}
