"""Successors of a state, with cached answers of the parts that an event leaves unchanged.

A state is what stands on either side, and what both share. Most events look at one side and at what is
shared, and leave the other side as it is: what comes of such an event is asked once of each pair of these,
and put together with whatever stands on the other side. Where a write lands is asked once of each pair of
sides.

That loses nothing, and nothing of it is taken on trust: what an event is not to look at is hidden from it
(`Hidden`). An event that looks all the same is asked in every state anew.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from tests.model.events import (
    flying,
    is_motion,
    landing,
    long_patient,
    moving,
    patient,
    turning,
)
from tests.model.laws import Broken
from tests.model.packing import GROUPS, RECEIVERS, SENDERS, Packing, cancels, tidy
from tests.model.troubles import Label, Make, troubles
from tests.model.world import DECODE, PREFILL, State, World


class Looked(Exception):
    """Raised when an event depends on what is hidden from it."""


class Hidden:
    """A stand-in for a value that code must not look at. It can be passed on, and any other use raises
    Looked."""

    def _looked(self, *_: object) -> NoReturn:
        raise Looked

    __bool__ = __contains__ = __eq__ = __getattr__ = __getitem__ = _looked
    __hash__ = __iter__ = __len__ = __or__ = __sub__ = _looked


HIDDEN: Final[Any] = Hidden()

K = TypeVar("K")
V = TypeVar("V")


class Once(dict[K, V]):
    """Cache of a function's result by key."""

    def __init__(self, ask: Callable[[K], V]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, key: K) -> V:
        self[key] = value = self._ask(key)
        return value


@dataclass(slots=True)
class Part:
    """Results of the events that one part of a state decides, as packed words of that part."""

    usual: list[int] = field(default_factory=list)
    troubles: list[int] = field(default_factory=list)
    across: list[tuple[Make, bool]] = field(default_factory=list)
    """Events that look at the rest of the state as well, and whether each is no trouble."""
    broken: Broken | None = None
    """The first law that one of the events breaks, if any."""
    moves: bool = False
    """Whether something happens without a deadline."""
    turns: bool = False
    """A turn changes something."""


_NO_FLIGHTS: Final = (Part(), list[int]())


class Following:
    def __init__(self, world: World, packing: Packing) -> None:
        self._world = world
        self._packing = packing
        self._parts = [Once(partial(self._ask, side)) for side in (PREFILL, DECODE)]
        self._patient = [Once(partial(self._ask_late, side)) for side in (PREFILL, DECODE)]
        self._between: dict[tuple[int, Any], tuple[Part, list[int]]] = {}
        self._checked: set[int] = set()
        """Pairs of sides."""
        self._without_cancels: set[int] = set()
        """Shared parts of states without cancels in the mail."""
        self._without_flights: set[int] = set()
        """Sender parts without flights."""
        unpack = packing.unpack
        self._shared_ends: Once[int, tuple[bool, bool, bool]] = Once(
            lambda word: world.shared_end(unpack(word))
        )
        self._sender_ends: Once[int, bool] = Once(lambda word: world.side_idle(unpack(word), PREFILL))
        self._receiver_ends: Once[int, tuple[bool, bool]] = Once(
            lambda word: world.receiver_end(unpack(word))
        )

    def of(self, word: int) -> tuple[list[int], list[int]]:
        """The states that follow this one, tidy or not: in the ordinary course of things, and by trouble.
        Raises Broken."""
        senders, receivers = word & SENDERS, word & RECEIVERS
        shared = word ^ senders ^ receivers
        between, first = self._flights(word)
        if first:
            return [each + shared for each in first], []
        prefill, decode = self._parts[PREFILL][senders | shared], self._parts[DECODE][receivers | shared]
        usual = [each + receivers for each in prefill.usual]
        usual += [each + senders for each in decode.usual]
        usual += [each + shared for each in between.usual]
        trouble = [each + receivers for each in prefill.troubles]
        trouble += [each + senders for each in decode.troubles]
        parts = [prefill, decode, between]
        if not (prefill.moves or decode.moves or between.moves):
            patient = self._patient[PREFILL][senders | shared], self._patient[DECODE][receivers | shared]
            usual += [each + receivers for each in patient[PREFILL].usual]
            usual += [each + senders for each in patient[DECODE].usual]
            parts += patient
            if not (prefill.turns or decode.turns):
                parts.append(self._very_late(word))
        for part in parts:
            if part.broken is not None:
                raise part.broken
            if part.across:
                self._ask_across(word, part.across, usual, trouble)
        return usual, trouble

    def check(self, word: int) -> None:
        """Check what must hold between the sides. Raises Broken."""
        pair = word & GROUPS
        if pair not in self._checked:
            self._world.check(self._packing.unpack(word))
            self._checked.add(pair)

    def tidy(self, word: int) -> int:
        shared = word ^ (word & GROUPS)
        if shared in self._without_cancels:
            return word
        state = self._packing.unpack(word)
        if not cancels(self._world, state):
            self._without_cancels.add(shared)
            return word
        tidied = tidy(self._world, state)
        return word if tidied is state else self._packing.pack(tidied)

    def end(self, word: int) -> tuple[bool, bool, bool]:
        """Whether nothing is held any more for any room; whether the last room is served; and whether it
        waits to be issued. A sender that stands still is not asked what it holds."""
        senders, receivers = word & SENDERS, word & RECEIVERS
        shared = word ^ senders ^ receivers
        over, stalled, waiting = self._shared_ends[shared]
        idle, served = self._receiver_ends[receivers]
        return over and idle and (stalled or self._sender_ends[senders]), served, waiting

    # ---- asked once

    def _ask_late(self, side: int, word: int) -> Part:
        part, state = Part(), self._one_side(side, word)
        self._take(part, side, state, patient(self._world, state, side), usual=True)
        return part

    def _ask(self, side: int, word: int) -> Part:
        part, state = Part(), self._one_side(side, word)
        moves = list(moving(self._world, state, side))
        part.moves = any(is_motion(label) for label, _ in moves)
        self._take(part, side, state, moves, usual=True)
        part.turns = self._take(part, side, state, turning(self._world, state, side), usual=True)
        self._take(part, side, state, troubles(self._world, state, side), usual=False)
        return part

    def _one_side(self, side: int, word: int) -> State:
        state = self._packing.unpack(word)
        if side == PREFILL:
            return State(state.senders, HIDDEN, *state[2:])
        return State(HIDDEN, state.receivers, *state[2:])

    def _take(
        self, part: Part, side: int, state: State, steps: Iterable[tuple[Label, Make]], *, usual: bool
    ) -> bool:
        """Ask each step what it makes of `state`. True if one makes something of it."""
        made, changed = part.usual if usual else part.troubles, False
        for _, make in steps:
            try:
                following = make(state)
            except Looked:
                part.across.append((make, usual))
                changed = True
                continue
            except Broken as broken:
                part.broken = part.broken or broken
                continue
            if following is not state and following != state:
                following = tidy(self._world, following, (side,))
                made.append(self._packing.side(side, following) | self._packing.shared(following))
                changed = True
        return changed

    def _flights(self, word: int) -> tuple[Part, list[int]]:
        """Return the ends of writes under way, and the ends that come before anything else."""
        if word & SENDERS in self._without_flights:
            return _NO_FLIGHTS
        key = (word & GROUPS, self._packing.peers(word))
        known = self._between.get(key)
        if known is None:
            state = self._packing.unpack(word)
            shared = [HIDDEN for _ in state[2:]]
            groups = State(state.senders, state.receivers, *shared).with_peers(state.peers)
            part, lands = Part(), list(flying(self._world, groups))
            if not any(each.flying for each in self._world.standings(state, PREFILL)):
                self._without_flights.add(word & SENDERS)
            part.moves = bool(lands)
            first = {label for label, _ in landing(self._world, lands)}
            firsts = []
            for label, make in lands:
                try:
                    following = make(groups)
                except Broken as broken:
                    part.broken = part.broken or broken
                    continue
                made = self._packing.side(PREFILL, following) | self._packing.side(DECODE, following)
                part.usual.append(made)
                if label in first:
                    firsts.append(made)
            known = self._between[key] = part, firsts
        return known

    # ---- asked in every state

    def _very_late(self, word: int) -> Part:
        part = Part()
        for _, make, usual in long_patient(self._world, self._packing.unpack(word)):
            part.across.append((make, usual))
        return part

    def _ask_across(
        self, word: int, across: list[tuple[Make, bool]], usual: list[int], trouble: list[int]
    ) -> None:
        state = self._packing.unpack(word)
        for make, ordinary in across:
            following = make(state)
            if following is not state and following != state:
                (usual if ordinary else trouble).append(self._packing.pack(following))
