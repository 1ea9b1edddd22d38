"""When are two states the same, and how are millions of them kept?

A reduction, and why nothing is lost by it:
  * A cancel that changes nothing on its side, of a room that has failed there or has left, is taken out of
    the mail at once. Neither can come back: `terminal-absorbs` and `terminal-creates-nothing` check that.
"""

from typing import Any, Final

from tests.model.world import State, World

_BITS: Final = 20


class Packing:
    """States as one integer each, so that millions fit: ranks are numbers already, and the rest of a state,
    of which few differ, is numbered here."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._rests: list[tuple[Any, ...]] = []

    def pack(self, state: State) -> int:
        rest = state[2:]
        word = self._numbers.get(rest)
        if word is None:
            word = self._numbers[rest] = len(self._rests)
            self._rests.append(rest)
        for rank in state.senders + state.receivers:
            if rank >> _BITS:
                raise OverflowError(f"more than {1 << _BITS} distinct ranks of a side")
            word = word << _BITS | rank
        return word

    def unpack(self, word: int, senders: int, receivers: int) -> State:
        ranks = []
        mask = (1 << _BITS) - 1
        for _ in range(senders + receivers):
            ranks.append(word & mask)
            word >>= _BITS
        ranks.reverse()
        return State(tuple(ranks[:senders]), tuple(ranks[senders:]), *self._rests[word])


def tidy(world: World, state: State) -> State:
    """`state` without the cancels that change nothing any more: one of all the states that differ from it
    without making a difference."""
    mail = state.mail
    cancels = world.cancels.get(mail)
    if cancels is None:
        cancels = world.cancels[mail] = tuple([message for message in mail if message[1] == "cancel"])
    for message in cancels:
        side, _, room, _ = message
        cast, standings = world.casts[side], world.casts[side].standings
        if all(
            standings[rank].over(room) and cast.do(rank, message[1:])[0] == rank for rank in state.ranks(side)
        ):
            mail = mail - {message}
    return state._replace(mail=mail) if mail is not state.mail else state
