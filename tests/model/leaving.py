"""End of a worker's process: by death, or because it was asked to leave."""

from baton.ids import Incarnation
from tests.model.laws import Broken, Law
from tests.model.registry import joined, lost, read_from
from tests.model.stream import met, parted
from tests.model.world import PREFILL, SIDES, State, World


def died(world: World, state: State, side: int) -> State:
    """Return the state after a worker's process ends with its writes and its memory. Another process takes
    its place, and the other side learns that it is gone."""
    return _gone(world, state, side, "exited")


def left(world: World, state: State, side: int) -> State:
    """Return the state after all ranks agreed to leave. Raises Broken if something that others wait for would
    end with them."""
    rooms = read_from(world, state, side, state.peers[side])
    cut = [room for room in rooms if world.is_running(state.rooms[room - 1])]
    if cut:
        raise Broken(Law.DRAIN_KEEPS_PROMISES, f"{SIDES[side]} leaves, and rooms {cut} still run on it")
    reached = world.reached(state)
    for standing in world.standings(state, PREFILL):
        for flight in standing.flying:
            if flight.peer in reached:
                raise Broken(
                    Law.DRAIN_KEEPS_PROMISES,
                    f"{SIDES[side]} leaves, and a {flight.kind} of room {flight.room} is under way",
                )
    return _gone(world, state, side, "left").with_draining(None)


def _gone(world: World, state: State, side: int, proof: str) -> State:
    gone = state.peers[side]
    following = parted(world, state, side)
    mail = frozenset(each for each in following.mail if each[0] != side) | {(1 - side, "depart", gone)}
    came, other = Incarnation(gone + 1), state.peers[1 - side]
    following = (
        following.with_ranks(side, world.blank(side, came))
        .with_mail(mail)
        .with_peers((came, other) if side == PREFILL else (other, came))
        .with_stalled(state.stalled and side != PREFILL)
        .with_lag(None if state.lag is not None and state.lag[0] == side else state.lag)
    )
    following = met(world, following, side)
    return joined(world, lost(world, following, side, gone, proof), side)
