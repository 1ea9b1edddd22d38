"""The language of stories, and the player that runs one.

A story is a text file: a comment that says what happens, then blocks of commands, `----`, and what the
stage says to them. Several commands on a line are divided by `;`. A **dialogue** is told line by line
instead: `>> command`, and under it what the stage says and each request of a rank to its world,
`<< Request`. Words in brackets may be left out.

    group decode ranks=2 pages=8 slots=2     a worker's ranks, each with so many pages and slots; prefixes=on
                                             keeps what rooms computed, checksum=pages sums what landed
    open decode room=7 needed=4 expected=3   the registry's room reaches every rank (prefill: no expected),
                                             or one rank alone, which is a bug: rank=1; deadline=… of each
                                             phase in ms, waiting=… of waiting for pages, ends=… when its
                                             request's time is over, choices=… that it has, like=… for a
                                             prompt of whole pages that others of that number share,
                                             arrived=… when its request came
    connect room=7                           decode is connected to the sender
    grant room=7                             decode's destination, the same on its ranks, reaches the
                                             sender's; [by=… another receiver, pages=… so many, prefix=…
                                             tokens held, unreachable=1 no connection leads there]
    post / ended room=7 rank=0               the sender has writes under way / they have ended
    step decode room=7 [over=1]              a step that reads or writes the room's pages begins / is over
    compute room=7 [tokens=4]                a step of the sender has computed so many tokens, or all
    write room=7 rank=0 pages=2              those bytes reach decode's memory, where it was told
    record room=7 rank=0 pages=3             the record, telling of 3 pages, reaches it; [tokens=…, token=…,
                                             damaged=1]
    seal room=7 rank=0 pages=3               the record and the seal reach it; [generation=… of another
                                             tenancy]
    written room=7 rank=0                    that rank of the sender saw all its pages DONE (or all ranks)
    broken room=7 rank=0                     a write of it has failed
    sealed room=7                            the sender's elected rank saw the seals DONE
    land room=7 rank=0 pages=3 [sealed=1]    decode notes pages, and a seal, without having read a record
    sum room=7 right=1                       what landed in decode's pages is summed
    draw / cut room=7 [choice=1 token=9]     a token is drawn [times=3] / a choice's reader has all it
                                             wants
    space decode                             the next step's rows get their pages: which are computed
    fail decode room=7 rank=1 reason=…       one rank alone sees a failure
    cancel decode room=7 reason=…            every rank is told to end the room
    close room=7 / quiet room=7              decode asks the sender to be quiet / notes that it is;
                                             [by=… another receiver, generation=…]
    depart decode                            its peer's process is known to be gone
    revoke [agreed=1]                        decode's memory is taken back from all who know it, or is to be
    reconnect room=7                         the sender hears where it is now, and where room 7's is no more
    finish room=7                            the sequence has ended
    drain decode                             it is to leave when it holds nothing
    turn decode now=10                       see, vote, agree, act
    show decode                              what every rank holds

In a dialogue with one side, that side is meant where none is named, room 7, and a millisecond after the last
command.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, Final

from baton.handover.route import Route
from baton.ids import Generation, Incarnation, PageId, RoomId
from baton.pages.errors import PagesError
from baton.pages.pool import PageState
from baton.rooms.errors import Cause, NotConnected, Reason, RoomError
from baton.rooms.evidence import Connected, Evidence, Failed, Granted, Landed, Sealed
from baton.rooms.phases import Phase, Vote
from tests.rooms.group import PEER, Settled, deadlines
from tests.stories.stage import DEADLINE_MS, LAYOUT, DecodeStage, PrefillStage, request

Words = Mapping[str, str]
Act = Callable[[int, Any], None]
"""An action on one rank, given its number and the rank."""
MARK = "----"
UNSAID: Final = ("peer", "exposure", "phase_ms", "of_rank")
"""Fields of requests that a dialogue leaves out, since they are always the same or do not matter."""
SAID: Final = ">> "
ASKED: Final = "<< "


class Play:
    """One story that is being played."""

    def __init__(self) -> None:
        self._stages: dict[str, DecodeStage | PrefillStage] = {}
        self._decode: DecodeStage
        self._prefill: PrefillStage
        self._now_ms = 0
        self._verbs: Mapping[str, Callable[[str, Words], list[str] | None]] = {
            name.removeprefix("do_"): getattr(self, name) for name in dir(self) if name.startswith("do_")
        }

    def say(self, line: str) -> list[str]:
        """Play one command. Returns what the stage says to it."""
        verb, *rest = line.split()
        side = rest.pop(0) if rest and "=" not in rest[0] else ""
        words = dict(word.split("=", 1) for word in rest)
        self._now_ms = int(words.get("now", self._now_ms))
        try:
            return self._verbs[verb](side, words) or []
        except (RoomError, PagesError, LookupError) as error:
            return [_wrong(error)]
        finally:
            self._asked = [asked for stage in self._stages.values() for asked in stage.take_requests()]

    def converse(self, line: str) -> list[str]:
        """Play commands, each a millisecond after the last. Returns what the stage says, and is asked for."""
        answers = []
        for part in line.split(";"):
            if part.startswith("group"):
                self._stages, self._now_ms = {}, 0
            self._now_ms += 1
            answers += [*self.say(part), *(ASKED + _asked(asked) for asked in self._asked)]
        return answers

    def do_group(self, side: str, words: Words) -> None:
        sizes = (int(words["ranks"]), int(words["pages"]), int(words["slots"]))
        more: dict[str, Any] = {word: words[word] for word in ("prefixes", "checksum") if word in words}
        if side == "decode":
            self._stages[side] = self._decode = DecodeStage(*sizes, **more)
        else:
            self._stages[side] = self._prefill = PrefillStage(*sizes, **more)

    def do_open(self, side: str, words: Words) -> list[str]:
        room, needed, ms = _room(words), int(words["needed"]), int(words.get("deadline", DEADLINE_MS))
        choices, like = int(words.get("choices", 1)), int(words.get("like", 0))
        asked = request(room, needed, int(words.get("expected", needed)), choices=choices, like=like)
        asked = replace(asked, arrived_ms=int(words.get("arrived", 0)))
        ends_ms = int(words["ends"]) if "ends" in words else None

        def act(_: int, rank: Any) -> None:
            opened = rank.open(room, asked, PEER, self._now_ms, ends_ms=ends_ms)
            opened.deadlines = replace(deadlines(ms), waiting_ms=int(words.get("waiting", ms)))

        return self._each(side, words, act)

    def do_connect(self, side: str, words: Words) -> list[str]:
        return self._note("decode", words, Connected())

    def do_grant(self, side: str, words: Words) -> list[str]:
        room, exposure = _room(words), Incarnation(1)
        grant = Granted(Generation(1), (tuple(map(PageId, range(int(words.get("pages", 0))))),), 0)
        if "decode" in self._stages:
            told = self._decode.told[0, room].grant
            grant = Granted(told.generation, told.pages, told.slot, told.prefix_tokens)
            exposure = told.exposure
        grant = replace(grant, prefix_tokens=int(words.get("prefix", grant.prefix_tokens)))
        lost = NotConnected("nothing leads there") if "unreachable" in words else None
        route = lost or Route(exposure, LAYOUT.page_tokens, ())
        return self._each("prefill", words, lambda _, rank: rank.grant(room, _peer(words), grant, route))

    def do_post(self, side: str, words: Words) -> None:
        self._prefill.posted.add((_rank(words), _room(words)))

    def do_ended(self, side: str, words: Words) -> None:
        self._prefill.posted.discard((_rank(words), _room(words)))

    def do_step(self, side: str, words: Words) -> None:
        for _, rank in self._ranks(side, words):
            rank.roster.get(_room(words)).busy = "over" not in words

    def do_compute(self, side: str, words: Words) -> list[str]:
        tokens = int(words["tokens"]) if "tokens" in words else None
        compute = self._prefill.compute
        return self._each("prefill", words, lambda n, _: compute(n, _room(words), self._now_ms, tokens))

    def do_write(self, side: str, words: Words) -> None:
        self._decode.write(_room(words), _rank(words), int(words["pages"]))

    def do_record(self, side: str, words: Words) -> None:
        self._decode.record(_room(words), _rank(words), words)

    def do_seal(self, side: str, words: Words) -> None:
        self.do_record(side, words)
        self._decode.seal(_room(words), _rank(words), int(words.get("generation", 0)))

    def do_written(self, side: str, words: Words) -> list[str]:
        return self._seen(words, written=True)

    def do_broken(self, side: str, words: Words) -> list[str]:
        return self._seen(words, failure="a write of it failed")

    def do_sealed(self, side: str, words: Words) -> list[str]:
        return self._seen(words, sealed=True)

    def do_land(self, side: str, words: Words) -> list[str]:
        generation = self._decode.ranks[_rank(words)].roster.get(_room(words)).generation
        if generation is None:
            return ["not exposed"]
        landed = self._note("decode", words, Landed(generation, (int(words["pages"]),)))
        return landed + (self._note("decode", words, Sealed(generation)) if "sealed" in words else [])

    def do_sum(self, side: str, words: Words) -> list[str]:
        total = int(words["right"])
        return self._each("decode", words, lambda _, rank: rank.summed(rank.roster.get(_room(words)), total))

    def do_draw(self, side: str, words: Words) -> list[str]:
        token, choice = int(words["token"]), int(words.get("choice", 0))
        times = int(words.get("times", 1))

        def act(number: int, _: Any) -> None:
            for _time in range(times):
                self._decode.draw(number, _room(words), choice, token)

        return self._each("decode", words, act)

    def do_space(self, side: str, words: Words) -> list[str]:
        said = [self._decode.space(number) for number, _ in self._ranks("decode", words)]
        return list(dict.fromkeys(said))

    def do_cut(self, side: str, words: Words) -> list[str]:
        return self._each("decode", words, lambda _, rank: rank.cut(_room(words), int(words["choice"])))

    def do_fail(self, side: str, words: Words) -> list[str]:
        return self._note(side, words, Failed(_cause(words)))

    def do_quiet(self, side: str, words: Words) -> list[str]:
        def act(_: int, rank: Any) -> None:
            held = rank.roster.get(_room(words)).generation if _room(words) in rank.roster else None
            rank.quiet(_room(words), Generation(int(words["generation"])) if "generation" in words else held)

        return self._each("decode", words, act, known=True)

    def do_depart(self, side: str, words: Words) -> list[str]:
        return self._each(side, words, lambda _, rank: rank.depart(PEER))

    def do_revoke(self, side: str, words: Words) -> None:
        self._decode.revoke(agreed_only="agreed" in words)

    def do_reconnect(self, side: str, words: Words) -> list[str]:
        return self._each("prefill", words, lambda _, rank: rank.revoke(PEER, Incarnation(2**32)))

    def do_finish(self, side: str, words: Words) -> list[str]:
        return self._each("decode", words, lambda n, _: self._decode.finish(n, _room(words)), known=True)

    def do_drain(self, side: str, words: Words) -> list[str]:
        self._each(side, words, lambda _, rank: rank.drain())
        return self.do_leave(side, words)

    def do_leave(self, side: str, words: Words) -> list[str]:
        left = [rank.may_leave() for _, rank in self._ranks(side, words)]
        return ["may leave" if all(left) else "may not leave yet"]

    def do_cancel(self, side: str, words: Words) -> list[str]:
        here = [_room(words) in rank.roster for _, rank in self._ranks(side, words)]
        self._each(side, words, lambda _, rank: rank.cancel(_room(words), _cause(words), self._now_ms))
        return [] if any(here) else [f"room {_room(words)} is not here"]

    def do_close(self, side: str, words: Words) -> list[str]:
        told = self._decode.told.get((0, _room(words))) if "decode" in self._stages else None
        generation = Generation(int(words.get("generation", told.grant.generation if told else 1)))
        close = (_room(words), _peer(words), generation, self._now_ms)
        wrong = self._each("prefill", words, lambda _, rank: rank.close(*close))
        quiet = all(_room(words) not in rank.roster for rank in self._prefill.ranks)
        return wrong or ["acknowledged" if quiet else "not yet: the sender holds the room"]

    def do_turn(self, side: str, words: Words) -> list[str]:
        stage = self._stage(side)
        rooms = [(room.index, room.id, room.phase) for room in stage.ranks[0].roster]
        stage.said.clear()
        settled = stage.turn(self._now_ms)
        lines = [line for room in rooms for line in _tell(settled, *room)]
        return lines + list(stage.said) or ["nothing to agree on"]

    def do_show(self, side: str, words: Words) -> list[str]:
        lines = []
        for number, rank in self._ranks(side, words):
            rooms = _list(f"{room.id} {room.phase.value}" for room in rank.roster) or "none"
            pages, slots = _count(rank.holdings.census()), _count(rank.holdings.slots.census())
            line = f"r{number}  rooms: {rooms}; pages: {pages}; slots: {slots}"
            dropped = rank.roster.dropped.total()
            line += f"; news dropped: {dropped}" if dropped else ""
            foreign = self._stage(side).foreign_pages(number)
            lines.append(line + (f"; pages overwritten by another room: {foreign}" if foreign else ""))
        return lines

    def _stage(self, side: str) -> DecodeStage | PrefillStage:
        return self._stages[side or next(iter(self._stages))]

    def _ranks(self, side: str, words: Words) -> list[tuple[int, Any]]:
        """Yield every rank with its number, or only the one that is named."""
        ranks = list(enumerate(self._stage(side).ranks))
        return [ranks[int(words["rank"])]] if "rank" in words else ranks

    def _each(self, side: str, words: Words, act: Act, *, known: bool = False) -> list[str]:
        """Do `act` on each rank, and return the errors, each once. `known`: also report ranks that do not
        hold the room."""
        said = []
        for number, rank in self._ranks(side, words):
            if known and _room(words) not in rank.roster:
                said.append(f"r{number} does not hold room {_room(words)}: dropped")
            try:
                act(number, rank)
            except (RoomError, PagesError) as error:
                said.append(_wrong(error))
        return list(dict.fromkeys(said))

    def _note(self, side: str, words: Words, evidence: Evidence) -> list[str]:
        return self._each(side, words, lambda _, rank: rank.note(_room(words), evidence), known=True)

    def _seen(self, words: Words, **writes: Any) -> list[str]:
        see = self._prefill.see
        return self._each("prefill", words, lambda n, _: see(n, _room(words), self._now_ms, **writes))


def _room(words: Words) -> RoomId:
    return RoomId(int(words.get("room", 7)))


def _rank(words: Words) -> int:
    return int(words.get("rank", 0))


def _peer(words: Words) -> Incarnation:
    return Incarnation(int(words.get("by", PEER)))


def _cause(words: Words) -> Cause:
    return Cause(Reason(words["reason"]), "as the story tells")


def _wrong(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).split(' (digests')[0]}"


def _list(words: Iterable[str]) -> str:
    return ", ".join(words)


def _count(census: Mapping[PageState, int]) -> str:
    return _list(f"{count} {state.value}" for state, count in census.items() if count)


def _asked(asked: Any) -> str:
    """A request, by its name and its fields."""
    told = ((each.name, _value(getattr(asked, each.name))) for each in fields(asked))
    said = [f"{name}={value}" for name, value in told if name not in UNSAID and value]
    return " ".join([type(asked).__name__, *said])


def _value(value: Any) -> str:
    match value:
        case Enum():
            return str(value.value)
        case Cause(reason, text):
            return f"{reason.value} ({text})"
        case (tuple(), *_):
            return " + ".join(map(_value, value))
        case tuple():
            return _list(map(str, value)) or "none"
        case _ if is_dataclass(value):
            told = ((each.name, getattr(value, each.name)) for each in fields(value))
            return _list(f"{name} {_value(said)}" for name, said in told if said not in (None, ()))
        case _:
            return str(value)


def _tell(settled: Settled[Any], place: int, room: RoomId, before: Phase) -> list[str]:
    """Return lines on a room's turn: the ranks' votes, the verdict, and where every rank is now."""
    wishes = []
    for rank, votes in enumerate(settled.wishes):
        reason = settled.reasons[rank].get(place) if votes[place] is Vote.ABORT else None
        why = f" ({reason.value})" if reason is not None else ""
        wishes.append(f"r{rank} {votes[place].name}{why}")
    moves = []
    for rank, effects in enumerate(settled.effects):
        moves += [
            f"r{rank} {before.value} -> {held.phase.value}, {effect.value}"
            for held, effect in effects
            if held.id == room
        ]
    same = {move.split(" ", 1)[1] for move in moves}
    if len(moves) == len(settled.effects) and len(same) == 1:
        moves = [f"all {same.pop()}"]
    line = f"room {room}  {_list(wishes)}: {settled.verdict[place].name}"
    return [line, *(f"    {move}" for move in moves)]


def play(text: str) -> str:
    """Play a story. Returns it with what the stage said in place of what it was expected to say."""
    out: list[str] = []
    performance = Play()
    for block in text.strip("\n").split("\n\n"):
        lines = block.split("\n")
        if all(line.startswith("#") for line in lines):
            out.append(block)
            continue
        if any(line.startswith(SAID) for line in lines):
            out.append("\n".join(_dialogue(performance, lines)))
            continue
        commands = lines[: lines.index(MARK)] if MARK in lines else lines
        said = [
            answer
            for command in commands
            if not command.startswith("#")
            for part in command.split(";")
            for answer in performance.say(part.strip())
        ]
        out.append("\n".join([*commands, MARK, *said]))
    return "\n\n".join(out) + "\n"


def _dialogue(performance: Play, lines: Iterable[str]) -> Iterator[str]:
    """Yield each command of a dialogue, and behind it the stage's replies and requests."""
    for line in lines:
        if line.startswith(SAID):
            yield line
            yield from performance.converse(line.removeprefix(SAID))
        elif line.startswith("#"):
            yield line
