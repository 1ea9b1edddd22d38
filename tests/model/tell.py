"""A path through the states as text that people can read and `tests/stories` can play.

What the language of the stories has a verb for is told with it; the rest, and what the sender's ranks post,
stands as comments between.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from baton.ids import RoomId
from baton.rooms.choice_pages import ChoicePages
from baton.rooms.errors import Reason
from baton.rooms.phases import Effect, Phase
from tests.model.events import after
from tests.model.flights import PAGE, SEAL, Flight, rank_of
from tests.model.laws import Broken, Law
from tests.model.packing import tidy
from tests.model.rank import Done
from tests.model.scopes import Scope
from tests.model.troubles import Label
from tests.model.turns import agree
from tests.model.world import DECODE, PREFILL, SIDES, Message, State, World


def tell(world: World, way: Sequence[State], end: Broken) -> str:
    """The events along `way` and the one that breaks a law, or that there is no way on."""
    lines = [_groups(world.scope), ""]
    here = way[0]
    for there in way[1:]:
        label, following = next(
            (label, following)
            for label, following in after(world, here)
            if not isinstance(following, Broken) and tidy(world, following) == there
        )
        lines += _lines(world, here, label) + _posted(world, here, following)
        here = tidy(world, following)
    if end.law not in (Law.ROOM_ENDS, Law.RECONNECT):
        broken = (label for label, result in after(world, here) if _is(result, end))
        lines += _lines(world, here, next(broken))
    return "\n".join([*lines, f"# {end.law.value} is broken: {end.text}"])


def _is(result: State | Broken, end: Broken) -> bool:
    return isinstance(result, Broken) and result.law is end.law


def _groups(scope: Scope) -> str:
    decode = f"group decode ranks={scope.receivers.ranks} pages={scope.pages} slots={scope.slots}"
    prefill = f"group prefill ranks={scope.senders.ranks} pages={scope.sender_pages} slots={scope.rooms}"
    return f"{decode}; {prefill}"


def _lines(world: World, state: State, label: Label) -> list[str]:
    verb, *about = label
    match verb:
        case "turn":
            return _turn(world, state, *about)
        case "deliver" if about[0][1] == "revoke":
            return ["# every decode rank is told to take its memory back", *_taken_back(world, state)]
        case "deliver":
            return [_message(world.scope, about[0])]
        case "repeat":
            return [_message(world.scope, about[0]), "# … and it is under way once more"]
        case "lose":
            return [f"# lost: {_message(world.scope, about[0])}"]
        case "stray":
            return [f"# late: {_message(world.scope, about[0])}"]
        case "miss":
            return [f"# nobody answers: {_message(world.scope, about[0])}"]
        case "lag":
            side, rank = about
            return [*_turn(world, state, side, None), f"# {SIDES[side]} r{rank} has not done that yet"]
        case "misconnect":
            return [f"{_message(world.scope, about[0])}, and r{about[1]} does not reach it"]
        case "land":
            return [_landed(world.scope, *about)]
        case _:
            return [_WORDS[verb](*about)]


_SEEN: Final = ("engine_failed", "transfer_failed")
_WORDS: Final[Mapping[str, Callable[..., str]]] = {
    "issue": lambda room: f"# the registry opens room {room} and calls prefill",
    "put fails": lambda rank, flight: (
        f"# the {flight.kind} of room {flight.room} from r{rank} fails on its way to r{rank_of(flight.peer)}"
    ),
    "fail": lambda side, rank, room: f"fail {SIDES[side]} room={room} rank={rank} reason={_SEEN[side]}",
    "acknowledge": lambda room: f"# prefill acknowledges the close of room {room}",
    "expire": lambda room: f"# the grant of room {room} waits no longer for its room",
    "break": lambda: "# the stream of decode to prefill breaks",
    "step ends": lambda side, rank: f"# the step that runs on {SIDES[side]} r{rank} ends",
    "die": lambda side: f"# the {SIDES[side]} worker dies, and another takes its place",
    "enough": lambda room, choice: f"# the reader of choice {choice} of room {room} has all it wants",
    "claim": lambda room: f"# decode's leader decides that room {room} is computed there",
    "abort": lambda room: f"# the client of room {room} hangs up",
    "silence": lambda: "# the lease of the prefill worker runs out while it lives on",
    "report": lambda: "# somebody who did not start the prefill worker reports its exit",
    "namesake": lambda: "# another process has the name of the prefill worker for the length of a lease",
    "stall": lambda: "# the prefill worker stands still",
    "wake": lambda: "# the prefill worker goes on",
    "revoke": lambda: "# the proof is overdue: decode's leader asks for the memory back",
    "orphan": lambda room: f"# who opened room {room} is gone, and its streams with it",
    "opener dies": lambda room: f"# the bootstrap of room {room} dies",
    "adopt": lambda room: f"# another bootstrap wants to adopt room {room}",
    "untold": lambda: "# the registry ends the rooms that all have given back and nobody ended",
    "overdue": lambda: "# the registry waits no longer for rooms to be reported retired",
    "join": lambda side: f"# the {SIDES[side]} worker registers again",
    "drain": lambda side: f"# the {SIDES[side]} worker is asked to leave",
    "drained": lambda side: f"# nobody waits for the {SIDES[side]} worker's rooms: it takes no more",
    "catch up": lambda side, rank: f"# {SIDES[side]} r{rank} does what was agreed",
    "forget": lambda side: f"# what the {SIDES[side]} worker remembers of rooms that are gone expires",
}


def _turn(world: World, state: State, side: int, late: tuple[int, RoomId] | None) -> list[str]:
    ranks = state.ranks(side)
    after: Sequence[int] = ranks
    done: Sequence[tuple[Done, ...]] = [()]
    with suppress(Broken):
        after, done, *_ = agree(world, side, ranks, late)
    lines: list[str] = []
    before = world.standing(side, ranks[0]).exposure
    if late is not None:
        rank, room = late
        lines.append(f"# on r{rank} the deadline of room {room} has passed")
        lines.append(f"fail {SIDES[side]} room={room} rank={rank} reason=deadline")
    lines.append(f"turn {SIDES[side]}")
    if done[0] and all(effect is Effect.QUEUE for _, effect, _ in done[0]):
        lines.append(f"turn {SIDES[side]}")
    if world.standing(side, after[0]).exposure != before:
        lines.append("revoke")
    return lines


def _taken_back(world: World, state: State) -> list[str]:
    rooms = world.standings(state, DECODE)[0].rooms.items()
    exposed = [room for room, at in rooms if at.phase is Phase.TRANSFERRING]
    return [f"fail decode room={room} reason={Reason.MEMORY_REVOKED.value}" for room in exposed]


def _message(scope: Scope, message: Message) -> str:
    side, deed, *about = message
    match deed:
        case "open" if side == PREFILL:
            return f"open prefill room={about[0]} needed={scope.prompt_pages}"
        case "open":
            longest = scope.prompt_pages + scope.grows * scope.tokens
            (needed,) = ChoicePages(scope.prompt_pages, longest, scope.choices, page_tokens=(1,)).needed
            room = about[0]
            return (
                f"open decode room={room} needed={needed} expected={scope.prompt_pages}; connect room={room}"
            )
        case "cancel":
            return f"cancel {SIDES[side]} room={about[0]} reason={about[1].value}"
        case "end_choice":
            return f"# decode is told that choice {about[1]} of room {about[0]} is enough"
        case "depart":
            return f"# {SIDES[side]} hears that {SIDES[1 - side]} worker {about[0]} is gone"
        case "orphan" | "adopt":
            sees = {"orphan": "sees the stream break of", "adopt": "is asked for its room by"}[deed]
            return f"# {SIDES[side]} {sees} bootstrap {about[1]}: room {about[0]}"
        case "compute_here":
            return f"# every decode rank is told to compute room {about[0]}"
        case "claim":
            return f"# prefill hears that decode computes room {about[0]}"
        case "retired":
            return f"# the bootstrap hears that {SIDES[about[1]]} has retired room {about[0]}"
        case "connect":
            return f"# decode asks prefill to connect to exposure {about[1]}"
        case "connected" | "revoke":
            return _PLAIN[deed]
        case _:
            return f"{deed} room={about[0]}"


_PLAIN: Final = {
    "connected": "# decode hears that prefill is connected",
    "revoke": "# … to take its memory back",
}


def _landed(scope: Scope, _: int, flight: Flight) -> str:
    """Return the story's line for a landed write. A part of a page in the model is a page in the story."""
    rank = rank_of(flight.peer)
    if flight.kind == PAGE:
        return f"write room={flight.room} rank={rank} pages=1"
    if flight.kind == SEAL:
        return f"seal room={flight.room} rank={rank} pages={scope.prompt_pages}"
    return f"# the record of room {flight.room} lands in slot {_names(flight)} of r{rank}"


def _posted(world: World, before: State, after: State) -> list[str]:
    lines = []
    for rank, (was, now) in enumerate(zip(before.senders, after.senders, strict=True)):
        old: Any = world.standing(PREFILL, was).flying
        for flight in world.standing(PREFILL, now).flying:
            if flight not in old:
                where = f"{flight.memory} {_names(flight)} of r{rank_of(flight.peer)}"
                lines.append(f"# prefill r{rank} posts the {flight.kind} of room {flight.room} to {where}")
    return lines


def _names(flight: Flight) -> str:
    return ", ".join(map(str, flight.targets))
