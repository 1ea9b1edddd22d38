"""Equality of states, and their compact storage by the million.

A reduction, and why nothing is lost by it:
  * A cancel that changes nothing on its side, of a room that has failed there or has left, is taken out of
    the mail at once. Neither can come back: `terminal-absorbs` and `terminal-creates-nothing` check that.
"""

from collections.abc import Hashable
from typing import Any, Final

from baton.ids import Incarnation
from tests.model.world import DECODE, PREFILL, State, World

BITS: Final = 24
_MASK: Final = (1 << BITS) - 1
SENDERS: Final = _MASK
RECEIVERS: Final = _MASK << BITS
GROUPS: Final = SENDERS | RECEIVERS
"""Bits of both sides' groups. The rest of a word is shared."""


class _Numbered:
    """Values that were met, each by a number of its own."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Hashable) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            if number >> BITS:
                raise OverflowError(f"more than {1 << BITS} distinct parts of a state")
            self.values.append(value)
        return number


class Packing:
    """States as one integer each, so that millions fit: what stands on each side, and what both share, of
    which few differ, are numbered here."""

    def __init__(self) -> None:
        self._senders, self._receivers, self._shared = _Numbered(), _Numbered(), _Numbered()

    def pack(self, state: State) -> int:
        return self.side(PREFILL, state) | self.side(DECODE, state) | self.shared(state)

    def side(self, side: int, state: State) -> int:
        """The part of the word that tells of one side."""
        if side == PREFILL:
            return self._senders.number(state.senders)
        return self._receivers.number(state.receivers) << BITS

    def shared(self, state: State) -> int:
        return self._shared.number(state[2:]) << 2 * BITS

    def peers(self, word: int) -> tuple[Incarnation, Incarnation]:
        """Return the live incarnations."""
        return State((), (), *self._shared.values[word >> 2 * BITS]).peers

    def unpack(self, word: int) -> State:
        shared = self._shared.values[word >> 2 * BITS]
        return State(
            self._senders.values[word & _MASK], self._receivers.values[word >> BITS & _MASK], *shared
        )


def tidy(world: World, state: State, sides: tuple[int, ...] = (PREFILL, DECODE)) -> State:
    """`state` without the cancels that change nothing any more on these sides: one of all the states that
    differ from it without making a difference."""
    mail = state.mail
    for message in cancels(world, state):
        side, _, room, *_ = message
        if side not in sides:
            continue
        cast, standings = world.casts[side], world.casts[side].standings
        if all(
            standings[rank].over(room) and cast.do(rank, message[1:])[0] == rank for rank in state.ranks(side)
        ):
            mail = mail - {message}
    return state.with_mail(mail) if mail is not state.mail else state


def cancels(world: World, state: State) -> tuple[Any, ...]:
    """Return the cancels in the mail."""
    mail = state.mail
    known = world.cancels.get(mail)
    if known is None:
        known = world.cancels[mail] = tuple([message for message in mail if message[1] == "cancel"])
    return known
