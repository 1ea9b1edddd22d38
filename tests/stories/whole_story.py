"""The language of whole stories: one request, or a few, with the router and both workers in one trace.

A whole story is told in `tests/stories/whole`: `>> command`, and under it what happens, in order. All that
decides is the product's: `Registry`, `OpenedRoom`, both sides, both halves of a session, and `Turn`. Messages
wait in order between each two parties, and writes on their way to decode's memory. Words in brackets may be
left out. What a command leads to that begins with `silently` is not told.

    stack [pages=8 slots=2 prefixes=on]      the router and a worker a side of one rank
    open [prompt=6 answer=3 choices=1        a client's request gets a room; the first is room 7. With many
          logprobs=30]                       log-probabilities, only prefill can report its first token
    flow                                     until nothing moves: all messages arrive, both workers take turns
                                             and steps, and writes land
    turn decode                              one turn, with a step if there is something to compute
    deliver router>decode                    what waits there now arrives, even if it is held
    hold / release router>decode             messages stay under way / go on. So do `writes`, `steps of
                                             prefill` and `prefill`, which then stands still
    lose decode>prefill                      what waits there never arrives, and that stream breaks
    hang up / end choice=1 / retry           the client leaves / wants no more of one choice / another room
                                             follows
    claim                                    decode decides to compute the prompt
    kill prefill / stop / start              its process ends, and another takes its place / none does / does
    drain decode                             it is to leave when it holds nothing
    disconnect / unreachable / reachable     prefill's connection breaks / decode's memory cannot be reached
    revoke                                   decode's memory is taken back from all senders
    pass ms=50                               time passes
    fire prefill early grant [room=7]        the time of a timer is over
    show                                     what each party holds
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from baton.handover.opener_messages import (
    Break,
    FirstToken,
    RoomOutcome,
    RoomTimer,
    TokenMessage,
)
from baton.handover.requests import ClaimRoom, Grant
from baton.handover.session_messages import NO_ROOM, Timer, TimerKind
from baton.ids import Incarnation, RoomId
from baton.pages.pool import PageState
from baton.rooms.errors import Cause, NoCapacity, NoSuchWorker
from baton.rooms.phases import Side
from baton.rooms.plurals import counted
from baton.rooms.request import Request, Sampling, TokenBatch
from tests.stories.router import FIRST_ROOM, Router
from tests.stories.workers import DecodeWorker, PrefillWorker, Worker

TURNS_MAX: Final = 100
SAID: Final = ">> "
SILENTLY: Final = "silently "
CHANNELS: Final = (
    "router>decode",
    "router>prefill",
    "decode>prefill",
    "prefill>decode",
    "prefill>router",
    "decode>router",
)
"""Ways of messages, in the order in which `flow` delivers."""


class Whole:
    """One whole story that is being played."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._lines: list[str] = []
        self._held: set[str] = set()
        self._way: dict[str, deque[tuple[Any, ...]]] = {each: deque() for each in CHANNELS}
        self._writes: deque[tuple[PrefillWorker, DecodeWorker, RoomId, str, int]] = deque()
        self._made: dict[str, Any] = {}
        self._started = 0

    # ---- what the parties need of the world

    def post(self, sender: str, to: str, message: tuple[Any, ...]) -> None:
        self._way[f"{sender}>{to}"].append(message)

    def trace(self, line: str) -> None:
        self._lines.append(line)

    def is_held(self, what: str) -> bool:
        return what in self._held

    def write(self, room: RoomId, kind: str, pages: int = 0) -> None:
        self._writes.append((self._prefill, self._decode, room, kind, pages))

    # ---- commands

    def say(self, line: str) -> list[str]:
        """Play one command. Return the trace of what happens."""
        verb, *rest = line.removeprefix(SILENTLY).split()
        words = dict(word.split("=", 1) for word in rest if "=" in word)
        about = " ".join(word for word in rest if "=" not in word)
        self._lines = []
        getattr(self, f"do_{verb}")(about, words)
        return [] if line.startswith(SILENTLY) else self._lines

    def do_stack(self, _: str, words: Mapping[str, str]) -> None:
        self._made = {
            "pages": int(words.get("pages", 8)),
            "slots": int(words.get("slots", 2)),
            "prefixes": words.get("prefixes", "off"),
        }
        self._router = Router(self.post, self.trace)
        self._prefill = PrefillWorker(self, self._incarnation(), **self._made)
        self._decode = DecodeWorker(self, self._incarnation(), **self._made)
        for side in (Side.PREFILL, Side.DECODE):
            self._router.join(side, self._worker(side.value).incarnation, 4)

    def do_open(self, _: str, words: Mapping[str, str]) -> None:
        prompt, answer = int(words.get("prompt", 6)), int(words.get("answer", 3))
        tops = int(words["logprobs"]) if "logprobs" in words else None
        request = Request(
            "request",
            (int(words.get("like", 1)),) * prompt,
            answer,
            sampling=Sampling(top_logprobs=tops),
            further_seeds=tuple(range(1, int(words.get("choices", 1)))),
            arrived_ms=self.now_ms,
        )
        self._place(lambda: self._router.open(request))

    def do_retry(self, _: str, words: Mapping[str, str]) -> None:
        self._place(lambda: self._router.retry(_room(words)))

    def _place(self, place: Callable[[], None]) -> None:
        try:
            place()
        except (NoSuchWorker, NoCapacity) as error:
            self.trace(f"router: {error}")

    def do_flow(self, about: str, words: Mapping[str, str]) -> None:
        for _ in range(TURNS_MAX):
            delivered, landed, turned = self._deliver_all(), self._land_all(), self._turns()
            if not (delivered or landed or turned):
                return
        raise AssertionError(f"still moves after {TURNS_MAX} turns")

    def do_turn(self, about: str, words: Mapping[str, str]) -> None:
        if not self._turn(about):
            self.trace("nothing moves")

    def do_deliver(self, about: str, words: Mapping[str, str]) -> None:
        for _ in range(len(self._way[about])):
            self._deliver(about)

    def do_hold(self, about: str, words: Mapping[str, str]) -> None:
        self._held.add(about)

    def do_release(self, about: str, words: Mapping[str, str]) -> None:
        self._held.remove(about)

    def do_lose(self, about: str, words: Mapping[str, str]) -> None:
        self.trace(f"lost: {', '.join(map(_told, self._way[about])) or 'nothing'}")
        for way in ("decode>prefill", "prefill>decode"):
            self._way[way].clear()
        self._prefill.stream_ended()
        self._decode.stream_ended()

    def do_hang(self, about: str, words: Mapping[str, str]) -> None:
        self._router.hang_up(_room(words))

    def do_end(self, about: str, words: Mapping[str, str]) -> None:
        self._router.end_choice(_room(words), int(words["choice"]))

    def do_claim(self, about: str, words: Mapping[str, str]) -> None:
        self._decode.claim(_room(words))

    def do_drain(self, about: str, words: Mapping[str, str]) -> None:
        self._router.drain(Side(about))
        self._worker(about).receive("drain")

    def do_kill(self, about: str, words: Mapping[str, str]) -> None:
        self._gone(about, "exited")
        self._start(about)

    def do_start(self, about: str, words: Mapping[str, str]) -> None:
        self._start(about)

    def do_stop(self, about: str, words: Mapping[str, str]) -> None:
        self._gone(about, "exited")

    def do_disconnect(self, about: str, words: Mapping[str, str]) -> None:
        self._prefill.exposure = None

    def do_unreachable(self, about: str, words: Mapping[str, str]) -> None:
        self._prefill.is_reachable = False

    def do_reachable(self, about: str, words: Mapping[str, str]) -> None:
        self._prefill.is_reachable = True

    def do_revoke(self, about: str, words: Mapping[str, str]) -> None:
        self._decode.revoke()

    def do_pass(self, about: str, words: Mapping[str, str]) -> None:
        self.now_ms += int(words["ms"])

    def do_fire(self, about: str, words: Mapping[str, str]) -> None:
        party, kind = about.split(" ", 1)
        if party == "router":
            self._router.passed(_room(words), RoomTimer(kind))
            return
        room = RoomId(int(words.get("room", NO_ROOM)))
        self._worker(party).fire(Timer(TimerKind(kind), room))

    def do_show(self, about: str, words: Mapping[str, str]) -> None:
        registry = self._router.registry
        going = [str(entry.id) for entry in registry.open_rooms()]
        timers = sorted(f"{timer.value} of {room}" for room, timer in self._router.timers)
        self.trace(f"router: rooms {_list(going)}; timers {_list(timers)}")
        for worker in (self._prefill, self._decode):
            rooms = [f"{room.id} {room.phase.value}" for room in worker.side.roster]
            pages, slots = worker.side.holdings.census(), worker.side.holdings.slots.census()
            running = sorted(f"{kind.value} of {room}" for kind, room in worker.timers)
            self.trace(
                f"{worker.NAME}: rooms {_list(rooms)}; pages {_count(pages)}; slots {_count(slots)};"
                f" timers {_list(running)}"
            )

    # ---- the world

    def _worker(self, name: str) -> Worker:
        return self._prefill if name == "prefill" else self._decode

    def _incarnation(self) -> Incarnation:
        self._started += 1
        return Incarnation(self._started)

    def _gone(self, name: str, proof: str) -> None:
        """End a worker's process with its messages, and with the writes that it has under way."""
        worker = self._worker(name)
        for way in CHANNELS:
            if name in way.split(">"):
                self._way[way].clear()
        if name == "prefill":
            self._writes.clear()
        other = "decode" if name == "prefill" else "prefill"
        self._worker(other).stream_ended()
        self._router.lose(Side(name), proof)
        self._way[f"router>{name}"].clear()  # what is sent to this process reaches no other
        self.post("router", other, ("depart", worker.incarnation))
        worker.has_left = True

    def _start(self, name: str) -> None:
        if name == "prefill":
            self._prefill = PrefillWorker(self, self._incarnation(), **self._made)
        else:
            self._decode = DecodeWorker(self, self._incarnation(), **self._made)
        self._router.join(Side(name), self._worker(name).incarnation, 4)

    def _deliver_all(self) -> bool:
        delivered = False
        for way in CHANNELS:
            to = way.split(">")[1]
            while self._way[way] and not self.is_held(way) and not self.is_held(to):
                self._deliver(way)
                delivered = True
        return delivered

    def _deliver(self, way: str) -> None:
        sender, to = way.split(">")
        message = self._way[way].popleft()
        self.trace(f"{sender} > {to}: {_told(message)}")
        if to == "router":
            self._router.receive(Side(sender), *message)
            return
        verb, *about = message
        worker = self._worker(to)
        if way == "decode>prefill":
            peer, *about = about
            if peer != worker.incarnation:
                self.trace("    another process is there now")
                return
        worker.receive(verb, *about)

    def _land_all(self) -> bool:
        if self.is_held("writes") or not self._writes:
            return False
        while self._writes:
            sender, receiver, room, kind, pages = self._writes.popleft()
            what = counted(pages, "page") if kind == "pages" else f"its {kind}"
            if receiver is not self._decode:
                self.trace(f"prefill => nobody: {what} of room {room}")
                sender.landed(room, "its receiver is gone")
                continue
            self.trace(f"prefill => decode: {what} of room {room}")
            self._land(receiver, room, kind, pages)
            sender.landed(room)
        return True

    def _land(self, receiver: DecodeWorker, room: RoomId, kind: str, pages: int) -> None:
        first = str(10 + len(self._router.rooms[room].request.output))
        match kind:
            case "pages":
                receiver.stage.write(room, 0, pages)
            case "record":
                receiver.stage.record(room, 0, {"pages": str(pages), "token": first})
            case "seal":
                receiver.stage.seal(room, 0, 0)

    def _turns(self) -> bool:
        prefill, decode = self._turn("prefill"), self._turn("decode")
        return prefill or decode

    def _turn(self, name: str) -> bool:
        worker = self._worker(name)
        if worker.has_left or self.is_held(name):
            return False
        moved = worker.turn()
        if worker.has_left:
            self._gone(name, "left")
        return moved


def _room(words: Mapping[str, str]) -> RoomId:
    return RoomId(int(words.get("room", FIRST_ROOM)))


def _told(message: tuple[Any, ...]) -> str:
    """Return a message as text."""
    return _told_by_router(message) or _told_by_peer(message) or _told_of_room(*message)


def _told_by_router(message: tuple[Any, ...]) -> str:
    """Return a message of the router to a worker as text. Empty for another message."""
    match message:
        case ("open", room, request, peer):
            output = f" and {len(request.output)} of the answer" if request.output else ""
            local = "" if peer is not None else ", without a prefill worker"
            return f"open room {room}, {len(request.prompt)} tokens{output}{local}"
        case ("cancel", room, cause):
            return f"end room {room}, {cause.reason.value}"
        case ("end choice", room, choice):
            return f"end choice {choice} of room {room}"
        case ("depart", _):
            return "the other worker's process is gone"
        case _:
            return ""


def _told_by_peer(message: tuple[Any, ...]) -> str:
    """Return a message between the two workers as text. Empty for another message."""
    match message:
        case ("connect", _, _, exposure):
            return f"connect to exposure {exposure}"
        case ("connected", _, exposure, error):
            return f"connected to exposure {exposure}" if error is None else f"not connected: {error}"
        case ("grant", _, Grant() as grant):
            pages = ", ".join(map(str, grant.pages[0])) or "none"
            prefix = f" behind {grant.prefix_tokens} tokens" if grant.prefix_tokens else ""
            return f"grant room {grant.room}, pages {pages}{prefix}, generation {grant.generation}"
        case ("claim", _, ClaimRoom(room)):
            return f"computes room {room} itself"
        case ("granted", _, room, error):
            return f"room {room} taken" if error is None else f"room {room} not taken: {error}"
        case ("close", _, room, generation):
            return f"close room {room}, generation {generation}"
        case ("closed", _, room, generation, error):
            return f"room {room} is quiet, generation {generation}" if error is None else f"refused: {error}"
        case _:
            return ""


def _told_of_room(room: RoomId, message: Any) -> str:
    """Return a worker's message about a room as text."""
    match message:
        case TokenMessage(TokenBatch(tokens, finish, choice)):
            ids = " ".join(str(token.id) for token in tokens)
            of = f" of choice {choice}" if choice else ""
            return f"room {room} token {ids}{of}" + _finish(finish)
        case FirstToken(token, finish):
            return f"room {room} first token {token.id}" + _finish(finish)
        case RoomOutcome(cause):
            return f"room {room} outcome {_cause(cause)}"
        case Break() as how:
            return f"room {room} refused, {how.value}"
        case str(word):
            return f"room {room} {word}"
        case _:
            return f"room {room} accepted"


def _finish(finish: Any) -> str:
    return "" if finish is None else f", {finish.value}"


def _cause(cause: Cause | None) -> str:
    return "complete" if cause is None else f"{cause.reason.value} ({cause.text})"


def _list(words: list[str]) -> str:
    return ", ".join(words) or "none"


def _count(census: Mapping[PageState, int]) -> str:
    return ", ".join(f"{count} {state.value}" for state, count in census.items() if count)


def play(text: str) -> str:
    """Play a whole story. Return it with what happens in place of what was expected."""
    out, performance = [], Whole()
    for line in text.strip("\n").split("\n"):
        if line.startswith(SAID):
            out.append(line)
            for command in line.removeprefix(SAID).split(";"):
                out += performance.say(command.strip())
        elif not line or line.startswith("#"):
            out.append(line)
    return "\n".join(out) + "\n"
