"""Hooks by which a test changes one rank of a real worker, and no other.

A hook is a patch of the product's own code in that rank's process. It does nothing until the test writes a
file of its name into the rank's folder; the text of the file says how. What a hook does on its part it says
with a file too (`NAME.done`, `NAME.held`), so that nobody has to guess when.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from baton.decode.decode_room import DecodeRoom
from baton.decode.decode_work import DecodeWork
from baton.decode.prefill_peers import LeaderPeers
from baton.handover import turn
from baton.handover.requests import ClaimRoom, Grant
from baton.ids import Incarnation, RoomId
from baton.pages.record import SEAL_OFFSET, SLOT_BYTES
from baton.prefill.prefill_room import PrefillRoom
from baton.prefill.prefill_work import PrefillWork
from baton.prefill.routes import Routes
from baton.rooms.ballot import Ballot, Verdict, read_verdict
from baton.rooms.choice_pages import ChoicePages
from baton.rooms.deadlines import Deadlines
from baton.rooms.errors import Cause, Reason
from baton.rooms.evidence import Failed
from baton.rooms.phases import AnyEffect, Phase, Vote
from baton.rooms.request import Request
from baton.rooms.roster import Capacity, Roster
from baton.transfer.nixl import NixlTransfer
from baton.transfer.transfer_protocol import SLOTS, PutId, PutState, Run, TransferError
from baton.wire.baton.v1 import inference_pb2, rooms_pb2
from baton.worker import turn_loop

TOLD: Final = "prefill: a hook says so to this rank alone"
STRAY_ROOM: Final = RoomId(77)
STRAY_DEADLINES: Final = Deadlines(60_000, 60_000, 60_000, 60_000, 60_000)


class Folder:
    """Folder of one rank: requests to its hooks, and their reports."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def asked(self, name: str) -> str | None:
        """Return the text of the hook's file, or None if the hook is not asked for."""
        try:
            return (self.path / name).read_text()
        except FileNotFoundError:
            return None

    def say(self, name: str, text: str = "") -> None:
        """Write a file in one step, so that a reader who sees it sees all of it."""
        draft = self.path / f".{name}"
        draft.write_text(text)
        draft.rename(self.path / name)

    def withdraw(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


def install(folder: Folder) -> None:
    """Install every hook. The last three are habits: they are active from the beginning, or not at all."""
    late_seal(folder)
    lost_grants(folder)
    fail_alone(folder)
    stray_room(folder)
    own_evidence(folder)
    if folder.asked("blind") is not None:
        blind()
    if folder.asked("drops_alone") is not None:
        drops_alone()
    if folder.asked("deaf") is not None:
        deaf()


def late_seal(folder: Folder) -> None:
    """Keep the elected sender's write of a seal to rank `RANK` of the receiver from beginning until the file
    is withdrawn."""
    ranks: dict[Incarnation, int] = {}
    held: dict[PutId, tuple[Any, ...]] = {}
    posted: dict[PutId, PutId] = {}
    connect, put, poll = Routes.connect, NixlTransfer.put, NixlTransfer.poll

    def connecting(routes: Routes, wire: inference_pb2.ConnectRequest) -> None:
        connect(routes, wire)
        ranks.update({Incarnation(each.incarnation): rank for rank, each in enumerate(wire.endpoints)})

    def putting(transfer: NixlTransfer, peer: Incarnation, region: str, runs: Sequence[Run]) -> PutId:
        seal = region == SLOTS and runs[0][1] % SLOT_BYTES == SEAL_OFFSET
        if not seal or folder.asked("late_seal") != str(ranks[peer]):
            return put(transfer, peer, region, runs)
        name = PutId(peer, -1 - len(held) - len(posted))
        held[name] = (peer, region, runs)
        folder.say("late_seal.held")
        return name

    def polling(transfer: NixlTransfer, name: PutId) -> PutState:
        if name in held:
            if folder.asked("late_seal") is not None:
                return PutState.PENDING
            folder.withdraw("late_seal.held")
            try:
                posted[name] = put(transfer, *held.pop(name))
            except TransferError:  # it has gone meanwhile
                return PutState.FAILED
        return poll(transfer, posted.get(name, name))

    _replace(Routes, connect=connecting)
    _replace(NixlTransfer, put=putting, poll=polling)


def lost_grants(folder: Folder) -> None:
    """Drop the grants of this decode worker's leader while the file is there, so that no sender learns where
    to write."""
    grant = LeaderPeers.grant

    def granting(peers: LeaderPeers, peer: rooms_pb2.Peer, message: Grant | ClaimRoom) -> None:
        if folder.asked("lost_grants") is None:
            grant(peers, peer, message)
        else:
            folder.say("lost_grants.done")

    _replace(LeaderPeers, grant=granting)


def fail_alone(folder: Folder) -> None:
    """Make this sender rank alone see a failure, once: of the first room that is `waiting` for its
    destination, or `computing` in part."""
    see = PrefillWork.observe

    def seeing(work: PrefillWork) -> bool:
        where = folder.asked("fail_alone")
        for room in work.roster if where is not None else ():
            waiting = room.phase is Phase.BOOTSTRAPPING
            partly = room.computable and room.computed > 0
            if waiting if where == "waiting" else partly:
                folder.withdraw("fail_alone")
                room.note(Failed(Cause(Reason.TRANSFER_FAILED, TOLD)))
                folder.say("fail_alone.done", str(room.id))
                break
        return see(work)

    _replace(PrefillWork, observe=seeing)


def stray_room(folder: Folder) -> None:
    """Add a room that no command opened to this rank's roster, once, and write in which turn."""
    take_turn, see_sent, see_received = turn_loop.take_turn, PrefillWork.observe, DecodeWork.observe
    number = 0

    async def taking(work: Any, group: Any, clock: Any, progress: turn_loop.TurnProgress) -> turn.Lap:
        nonlocal number
        number = progress.turn
        return await take_turn(work, group, clock, progress)

    def enter(work: Any, room: Callable[..., Any]) -> None:
        if folder.asked("stray_room") is None:
            return
        folder.withdraw("stray_room")
        now_ms = work.ports.clock.now_ms()

        def make(place: int) -> Any:
            return room(STRAY_ROOM, "stray", Incarnation(1), place, 1, STRAY_DEADLINES, now_ms)

        work.roster.open(STRAY_ROOM, make, now_ms)
        folder.say("stray_room.done", str(number))

    def seeing_sent(work: PrefillWork) -> bool:
        enter(work, partial(PrefillRoom, request=Request("stray", (1,), 1)))
        return see_sent(work)

    def seeing_received(work: DecodeWork) -> bool:
        asked = Request("stray", (1,), 1)
        enter(work, partial(DecodeRoom, request=asked, division=ChoicePages(1, 1, 1, (1,))))
        return see_received(work)

    _replace(turn_loop, take_turn=taking)
    _replace(PrefillWork, observe=seeing_sent)
    _replace(DecodeWork, observe=seeing_received)


def own_evidence(folder: Folder) -> None:
    """Let this rank go on by its own evidence, whatever the others have, while the file is there, as in an
    old defect."""

    def reading(mine: Ballot, agreed: Sequence[int]) -> Verdict:
        verdict = read_verdict(mine, agreed)
        if folder.asked("own_evidence") is None:
            return verdict
        pairs = zip(mine.votes, verdict.votes, strict=True)
        votes = tuple(wish if wish is Vote.ADVANCE else agreed for wish, agreed in pairs)
        return Verdict(verdict.compute, verdict.leave, votes, verdict.reasons, verdict.connects)

    _replace(turn, read_verdict=reading)


def blind() -> None:
    """Skip the comparison of which rooms the ranks hold, as in an old defect."""
    _replace(Roster, digest=lambda *_: 0)


def drops_alone() -> None:
    """Let this rank drop a waiting room by itself when it sees a failure, without an agreement, as in an old
    defect."""
    votes, settle = Roster.votes, Roster.settle

    def voting(roster: Roster[Any], now_ms: int, capacity: Capacity) -> list[Vote]:
        wishes = votes(roster, now_ms, capacity)
        for room in roster:
            if room.phase is Phase.BOOTSTRAPPING:
                wishes[room.index] = max(wishes[room.index], Vote.STAY)
        return wishes

    def settling(
        roster: Roster[Any],
        verdicts: Sequence[Vote],
        now_ms: int,
        reasons: Mapping[int, Reason] = MappingProxyType({}),
    ) -> list[tuple[Any, AnyEffect]]:
        moves = list(verdicts)
        for room in roster:
            if room.phase is Phase.BOOTSTRAPPING and room.cause is not None:
                moves[room.index] = Vote.ABORT
        return settle(roster, moves, now_ms, reasons)

    _replace(Roster, votes=voting, settle=settling)


def deaf() -> None:
    """Keep this rank behind the first from the news that a room was ended from outside, as in an old
    defect."""
    _replace(Roster, cancel=lambda *_: False)


def _replace(where: Any, **those: Callable[..., Any]) -> None:
    for name, what in those.items():
        setattr(where, name, what)
