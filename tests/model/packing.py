"""When are two states the same, and how are millions of them kept?

Reductions, and why nothing is lost by them:
  * Ranks of a group are alike: what follows from a deed of the leader follows equally from any rank's, so
    that pairs of ranks can be sorted.
  * A cancel that changes nothing on its side, of a room that has failed there or has left, is taken out of
    the mail at once. Neither can come back: `terminal-absorbs` and `terminal-creates-nothing` check that.
"""

from typing import Any, Final

from tests.model.world import State, World, with_pairs

_BITS: Final = 20


class Packing:
    """States as one integer each, so that millions fit: ranks are numbers already, and the rest of a state,
    of which few differ, is numbered here."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._rests: list[tuple[Any, ...]] = []

    def pack(self, state: State) -> int:
        rest = state[1:]
        word = self._numbers.get(rest)
        if word is None:
            word = self._numbers[rest] = len(self._rests)
            self._rests.append(rest)
        for sender, receiver in state.pairs:
            if max(sender, receiver) >> _BITS:
                raise OverflowError(f"more than {1 << _BITS} distinct ranks of a side")
            word = ((word << _BITS | sender) << _BITS) | receiver
        return word

    def unpack(self, word: int, ranks: int) -> State:
        pairs = []
        mask = (1 << _BITS) - 1
        for _ in range(ranks):
            pairs.append((word >> _BITS & mask, word & mask))
            word >>= 2 * _BITS
        return State(tuple(reversed(pairs)), *self._rests[word])


def same(world: World, state: State) -> State:
    """One of all the states that differ from `state` without making a difference."""
    leaders, pairs = 1 if world.scope.ways else 0, state.pairs
    if len(pairs) - leaders > 1:
        state = with_pairs(state, pairs[:leaders] + tuple(sorted(pairs[leaders:])))
    return tidy(world, state)


def tidy(world: World, state: State) -> State:
    """`state` without the cancels that change nothing any more."""
    mail = state.mail
    cancels = world.cancels.get(mail)
    if cancels is None:
        cancels = world.cancels[mail] = tuple([message for message in mail if message[1] == "cancel"])
    for message in cancels:
        side, _, room, _ = message
        cast, standings = world.casts[side], world.casts[side].standings
        if all(
            standings[pair[side]].over(room) and cast.do(pair[side], message[1:])[0] == pair[side]
            for pair in state.pairs
        ):
            mail = mail - {message}
    return state._replace(mail=mail) if mail is not state.mail else state
