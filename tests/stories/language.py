"""How is a story told, and how is it played?

A story is a text file: a comment that says what happens, then blocks of commands, `----`, and what the
stage says to them.

    group decode ranks=2 pages=8 slots=2     a worker's ranks, each with so many pages and slots
    open decode room=7 needed=4 expected=3   the registry's room reaches every rank (prefill: no expected),
                                             or one rank alone, which is a bug: rank=1; deadline=… of each
                                             phase in ms, waiting=… of waiting for pages,
                                             ends=… when its request's time is over
    connect room=7                           decode is connected to the sender
    grant room=7                             decode's destination, the same on its ranks, reaches the sender's
    post / ended room=7 rank=0               the sender has writes under way / they have ended
    write room=7 rank=0 pages=2              those bytes reach decode's memory, where it was told
    seal room=7 rank=0 pages=3               the record, telling of 3 pages, and the seal reach it
    written room=7 rank=0                    that rank of the sender saw all its pages DONE (or all ranks)
    sealed room=7                            the sender's elected rank saw the seals DONE
    land room=7 rank=0 pages=3               decode notes pages without having read a record
    fail decode room=7 rank=1 reason=…       one rank alone sees a failure
    cancel decode room=7 reason=…            every rank is told to end the room
    close room=7 / quiet room=7              decode asks the sender to be quiet / notes that it is
    revoke                                   decode's memory is taken back from all who know it
    reconnect room=7                         the sender hears where it is now, and where room 7's is no more
    finish room=7                            the sequence has ended
    turn decode now=10                       see, vote, agree, act
    show decode                              what every rank holds
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from services.ids import RoomId
from services.pages.errors import PagesError
from services.pages.pool import PageState
from services.rooms.errors import Cause, Reason, RoomError
from services.rooms.evidence import Connected, Failed, Fenced, Finished, Landed, Proof, Written
from services.rooms.phases import Phase, Vote
from services.rooms.quarantine import in_quarantine
from services.rooms.room import Room
from services.rooms.roster import Roster
from tests.rooms.group import Settled, receiver, sender
from tests.stories.stage import DecodeStage, PrefillStage

Words = Mapping[str, str]
MARK = "----"
DEADLINE_MS = 40


class Play:
    """One story being played."""

    def __init__(self) -> None:
        self._stages: dict[str, DecodeStage | PrefillStage] = {}
        self._now_ms = 0
        self._verbs: Mapping[str, Callable[[str, Words], list[str]]] = {
            name.removeprefix("do_"): getattr(self, name) for name in dir(self) if name.startswith("do_")
        }

    def say(self, line: str) -> list[str]:
        """Play one command. Returns what the stage says to it."""
        verb, *rest = line.split()
        side = rest.pop(0) if rest and "=" not in rest[0] else ""
        words = dict(word.split("=", 1) for word in rest)
        self._now_ms = int(words.get("now", self._now_ms))
        try:
            return self._verbs[verb](side, words)
        except (RoomError, PagesError, LookupError) as error:
            return [f"{type(error).__name__}: {str(error).split(' (digests')[0]}"]

    def do_group(self, side: str, words: Words) -> list[str]:
        ranks, pages, slots = int(words["ranks"]), int(words["pages"]), int(words["slots"])
        stage = DecodeStage if side == "decode" else PrefillStage
        self._stages[side] = stage(ranks, pages, slots)
        return []

    def do_open(self, side: str, words: Words) -> list[str]:
        room, needed, now_ms = _room(words), int(words["needed"]), self._now_ms
        ms, expected = int(words.get("deadline", DEADLINE_MS)), int(words.get("expected", 0))

        def make(place: int, rank: int) -> Any:
            if side == "prefill":
                made: Room = sender(room, place, needed=needed, now_ms=now_ms, ms=ms, elected=rank == 0)
            else:
                made = receiver(room, place, needed=needed, expected=expected, now_ms=now_ms, ms=ms)
            made.deadlines = replace(made.deadlines, waiting_ms=int(words.get("waiting", ms)))
            made.ends_ms = int(words["ends"]) if "ends" in words else None
            return made

        for rank, roster in self._ranks(side, words):
            roster.open(room, partial(make, rank=rank), now_ms)
        return []

    def do_connect(self, side: str, words: Words) -> list[str]:
        return self._note("decode", words, Connected())

    def do_grant(self, side: str, words: Words) -> list[str]:
        room = _room(words)
        noted = self._prefill.grant(room, self._decode.memories[0].told[room])
        return [] if all(noted) else [f"room {room} is not known to the sender: dropped"]

    def do_post(self, side: str, words: Words) -> list[str]:
        self._prefill.memories[int(words["rank"])].posted.add(_room(words))
        return []

    def do_ended(self, side: str, words: Words) -> list[str]:
        self._prefill.memories[int(words["rank"])].posted.discard(_room(words))
        return []

    def do_write(self, side: str, words: Words) -> list[str]:
        self._decode.write(_room(words), int(words["rank"]), int(words["pages"]))
        return []

    def do_seal(self, side: str, words: Words) -> list[str]:
        self._decode.seal(_room(words), int(words["rank"]), int(words["pages"]))
        return []

    def do_written(self, side: str, words: Words) -> list[str]:
        return self._note("prefill", words, Written())

    def do_sealed(self, side: str, words: Words) -> list[str]:
        self._prefill.sealed(_room(words))
        return []

    def do_land(self, side: str, words: Words) -> list[str]:
        generation = self._decode.group.rosters[int(words["rank"])].get(_room(words)).generation
        if generation is None:
            return ["not exposed"]
        return self._note("decode", words, Landed(generation, int(words["pages"])))

    def do_fail(self, side: str, words: Words) -> list[str]:
        return self._note(side, words, Failed(_cause(words)))

    def do_quiet(self, side: str, words: Words) -> list[str]:
        return self._note("decode", words, Fenced(Proof.QUIET))

    def do_revoke(self, side: str, words: Words) -> list[str]:
        for roster in self._rosters("decode"):
            for room in filter(in_quarantine, roster):
                room.note(Fenced(Proof.REVOKED))
        return []

    def do_reconnect(self, side: str, words: Words) -> list[str]:
        cause = Cause(Reason.MEMORY_REVOKED, "as the story tells")
        return [
            *self._note("prefill", words, Failed(cause)),
            *self._note("prefill", words, Fenced(Proof.REVOKED)),
        ]

    def do_finish(self, side: str, words: Words) -> list[str]:
        return self._note("decode", words, Finished())

    def do_cancel(self, side: str, words: Words) -> list[str]:
        rosters = self._rosters(side)
        here = [roster.cancel(_room(words), _cause(words), self._now_ms) for roster in rosters]
        return [] if any(here) else [f"room {words['room']} is not here"]

    def do_close(self, side: str, words: Words) -> list[str]:
        quiet = self._prefill.close(_room(words), self._now_ms)
        return ["acknowledged" if quiet else "not yet: the sender holds the room"]

    def do_turn(self, side: str, words: Words) -> list[str]:
        stage = self._stages[side]
        rooms = [(room.place, room.id, room.phase) for room in self._rosters(side)[0]]
        stage.said.clear()
        settled = stage.turn(self._now_ms)
        lines = [line for room in rooms for line in _tell(settled, *room)]
        return lines + list(stage.said) or ["nothing to agree on"]

    def do_show(self, side: str, words: Words) -> list[str]:
        stage = self._stages[side]
        lines = []
        for rank, memory in enumerate(stage.memories):
            roster = self._rosters(side)[rank]
            rooms = _list(f"{room.id} {room.phase.value}" for room in roster) or "none"
            pages, slots = _count(memory.holdings.pages.census()), _count(memory.holdings.slots.census())
            line = f"r{rank}  rooms: {rooms}; pages: {pages}; slots: {slots}"
            dropped = roster.dropped.total()
            line += f"; news dropped: {dropped}" if dropped else ""
            foreign = memory.foreign_pages()
            lines.append(line + (f"; pages overwritten by another room: {foreign}" if foreign else ""))
        return lines

    @property
    def _decode(self) -> DecodeStage:
        stage = self._stages["decode"]
        if not isinstance(stage, DecodeStage):
            raise TypeError("decode is not on stage")
        return stage

    @property
    def _prefill(self) -> PrefillStage:
        stage = self._stages["prefill"]
        if not isinstance(stage, PrefillStage):
            raise TypeError("prefill is not on stage")
        return stage

    def _rosters(self, side: str) -> Sequence[Roster[Any]]:
        return self._stages[side].group.rosters

    def _ranks(self, side: str, words: Words) -> list[tuple[int, Roster[Any]]]:
        """Every rank's roster, or the one that is named."""
        rosters = list(enumerate(self._rosters(side)))
        return [rosters[int(words["rank"])]] if "rank" in words else rosters

    def _note(self, side: str, words: Words, evidence: Any) -> list[str]:
        ranks = self._ranks(side, words)
        missed = [rank for rank, roster in ranks if not roster.note(_room(words), evidence)]
        return [f"r{rank} does not hold room {words['room']}: dropped" for rank in missed]


def _room(words: Words) -> RoomId:
    return RoomId(int(words["room"]))


def _cause(words: Words) -> Cause:
    return Cause(Reason(words["reason"]), "as the story tells")


def _list(words: Iterable[str]) -> str:
    return ", ".join(words)


def _count(census: Mapping[PageState, int]) -> str:
    return _list(f"{count} {state.value}" for state, count in census.items() if count)


def _tell(settled: Settled[Any], place: int, room: RoomId, before: Phase) -> list[str]:
    """What the ranks wished for one room, what was agreed, and where every rank is now."""
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
