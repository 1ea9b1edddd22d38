"""Tests of the stream of a room, which merges those of its two workers and ends both when one fails."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator

import pytest

from baton.api.backend import Hangup, NoWorker, Overloaded
from baton.fleet.room_entry import RoomPhase
from baton.fleet.worker_record import WorkerState
from baton.handover import opened_room
from baton.ids import RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Side
from baton.wire.errors import MailboxFull
from tests.bootstrap.scripted import LENGTH, House, accepted, asked, ended, first, house, read, tokens
from tests.wire.servers import until

P, D = Side.PREFILL, Side.DECODE


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house() as made:
        yield made


@pytest.fixture(autouse=True)
def _no_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the wait before a stream is cut off longer than a test may take, so that a test which needs the
    cut fails."""
    monkeypatch.setattr(opened_room, "LINGER_S", 1_000.0)


async def test_the_first_token_comes_from_prefill_and_does_not_wait_for_decode(at: House) -> None:
    go = asyncio.Event()
    at.prefill.script = [accepted(P), first(7), ended(P)]
    at.decode.script = [accepted(D), go, tokens(0, [7]), tokens(1, [8]), tokens(2, [9], LENGTH), ended(D)]
    stream = await at.backend.generate(asked())
    assert [token.id for token in (await stream.next()).tokens] == [7]
    assert at.entry().phase is RoomPhase.STREAMING
    go.set()
    assert await read(stream) == ([8, 9], "length"), "decode's copy of the first token is not passed on twice"
    await at.unfollowed()
    assert at.prefill.cancels == {}
    assert at.decode.cancels == {}
    assert at.entry().cause is None
    at.retired()
    await at.at_rest()


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ([None], [], "prefill_lost"),
        ([accepted(P), first(7), ended(P)], [accepted(D), tokens(0, [7]), None], "decode_lost"),
        ([ended(P)], [], "prefill_lost"),
        ([RuntimeError("a bug")], [], "prefill_lost"),
        ([accepted(P), ended(P, Cause(Reason.ENGINE_FAILED, "NaN"))], [accepted(D)], "engine_failed"),
        ([accepted(P)], [accepted(D), ended(D, Cause(Reason.RECORD_CORRUPT, "torn"))], "record_corrupt"),
        ([accepted(P)], [MailboxFull("too many commands wait")], "refused"),
    ],
    ids=[
        "prefill ends at once",
        "decode ends without an outcome",
        "an outcome before it was accepted",
        "prefill raises",
        "prefill's outcome",
        "decode's outcome",
        "decode refuses",
    ],
)
async def test_whatever_ends_one_stream_ends_the_room_and_the_other_side(
    at: House, prefill: list[object], decode: list[object], reason: str
) -> None:
    at.prefill.script, at.decode.script = prefill, decode
    _, how = await read(await at.backend.generate(asked()))
    assert how == reason
    cause = at.entry().cause
    assert cause is not None
    assert cause.reason.value == reason
    assert "failed" in at.events()
    at.prefill.cancelled.set()
    at.decode.cancelled.set()
    if decode:
        await until(lambda: at.prefill.cancels.get(1) == reason)
    if at.registry.open_count():
        at.retired()
    await at.at_rest()


async def test_terminal_reaches_peer_a_room_that_failed_before_it_was_followed_ends_its_stream(
    at: House,
) -> None:
    """Its worker was lost between the room's opening and the moment at which its caller followed the
    stream."""
    entry = await at.admission.admit("r1", 3, 6)
    at.rooms.fail(entry.id, Cause(Reason.PREFILL_LOST, "its lease ran out"))
    stream = at.backend.follow(entry, asked())
    assert await read(stream) == ([], "prefill_lost")
    assert at.prefill.called == at.decode.called == [], "nobody is asked to serve it"
    at.retired()
    await at.at_rest()


async def test_a_decode_worker_that_does_not_say_why_it_gave_its_room_up_is_not_waited_for(
    at: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened_room, "ROOT_S", 0.05)
    closed = Cause(Reason.RECEIVER_CLOSED, "the decode worker gave the room up")
    at.prefill.script = [accepted(P), first(7), ended(P, closed)]
    at.decode.script = [accepted(D), tokens(0, [7])]
    assert await read(await at.backend.generate(asked())) == ([7], "receiver_closed")
    await until(lambda: at.decode.cancels.get(1) == "receiver_closed")
    at.decode.cancelled.set()
    at.retired()
    await at.at_rest()


async def test_room_ends_a_worker_that_never_got_the_room_is_not_waited_for(at: House) -> None:
    """The call broke on its way. The cancel of the room shows whether it had arrived."""
    at.prefill.script = [accepted(P)]
    at.decode.script = [None]
    at.decode.absent = {1}
    assert await read(await at.backend.generate(asked())) == ([], "decode_lost")
    await until(lambda: at.prefill.cancels.get(1) == at.decode.cancels.get(1) == "decode_lost")
    await until(lambda: set(at.entry().waiting_for) == {Side.PREFILL})
    at.prefill.cancelled.set()
    at.retired()
    await at.at_rest()


@pytest.mark.parametrize("answered", [False, True])
async def test_zero_at_idle_a_worker_that_comes_back_is_told_what_ended_while_it_was_silent(
    at: House, answered: bool
) -> None:
    """The worker was stopped before it read the opening, so it has no report of the room."""
    at.decode.script = []
    at.decode.absent = {1}
    at.prefill.script = [accepted(P), first(7, LENGTH)] if answered else [accepted(P)]
    stream = await at.backend.generate(asked())
    await until(lambda: at.decode.called == [1])
    if answered:
        assert await read(stream) == ([7], "length")
    at.rooms.lose(at.decode.incarnation, "its lease ran out", proof=None)
    if not answered:
        assert await read(stream) == ([], "decode_lost")
    at.prefill.cancelled.set()
    at.rooms.side_retired(RoomId(1), P)
    await at.unfollowed()
    assert (set(at.entry().waiting_for), at.decode.cancels) == ({D}, {})
    at.join(at.decode)
    await until(lambda: at.decode.cancels == {1: "answered" if answered else "decode_lost"})
    await at.at_rest()


async def test_a_refused_room_is_waited_for_on_the_other_side_alone(at: House) -> None:
    at.prefill.script, at.decode.script = [MailboxFull("too many commands wait")], [accepted(D)]
    at.prefill.absent = {1}
    assert await read(await at.backend.generate(asked())) == ([], "refused")
    cause = at.entry().cause
    assert cause is not None
    assert "prefill worker prefill-0: too many commands wait" in cause.text
    await until(lambda: at.decode.cancels.get(1) == "refused")
    await until(lambda: set(at.entry().waiting_for) == {D})
    at.decode.cancelled.set()
    at.rooms.side_retired(RoomId(1), D)
    await at.at_rest()


async def test_a_worker_that_cannot_be_reached_gets_no_rooms_until_it_renews(at: House) -> None:
    at.prefill.address = "127.0.0.1:1"
    at.rooms.lose(at.prefill.incarnation, "moved", proof="left")
    at.prefill.incarnation = type(at.prefill.incarnation)(12)
    at.join(at.prefill)
    assert await read(await at.backend.generate(asked())) == ([], "prefill_lost")
    assert at.registry.worker(at.prefill.incarnation).state is WorkerState.SUSPECT
    waiting = asyncio.ensure_future(at.backend.generate(asked()))
    await until(lambda: at.admission.queued() == 1)
    at.rooms.renew(at.prefill.incarnation)
    assert at.registry.worker(at.prefill.incarnation).state is WorkerState.READY
    assert await read(await waiting) == ([], "prefill_lost")
    at.retired()
    at.retired(2)


async def test_a_worker_that_is_gone_is_not_told_again_that_its_room_ended(
    at: House, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of the room is not sent again to a lost worker, whose channel is closed by then."""
    at.prefill.address = "127.0.0.1:1"
    at.rooms.lose(at.prefill.incarnation, "moved", proof="left")
    at.prefill.incarnation = type(at.prefill.incarnation)(12)
    at.join(at.prefill)
    with caplog.at_level("DEBUG"):
        assert await read(await at.backend.generate(asked())) == ([], "prefill_lost")
        await until(lambda: at.rooms.streams.over() == 2)
    at.decode.cancelled.set()
    at.exited(at.prefill.name, at.prefill.pid)
    await at.channels.drop(at.prefill.incarnation)
    at.retired()
    await asyncio.sleep(0.1)
    assert at.prefill.incarnation not in at.channels.incarnations()
    await at.at_rest()
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.mark.parametrize("when", ["before accepted", "while computing", "while streaming"])
async def test_a_client_that_hangs_up_stops_both_sides(at: House, when: str) -> None:
    at.prefill.script = [accepted(P), first(7)]
    at.decode.script = [accepted(D), tokens(0, [7])]
    if when == "before accepted":
        at.prefill.script = at.decode.script = []
    stream = await at.backend.generate(asked())
    await until(lambda: at.prefill.called == at.decode.called == [1])
    if when == "while streaming":
        await stream.next()
    await stream.hang_up(Hangup.CLIENT_GONE)
    await stream.hang_up(Hangup.CLIENT_GONE)
    await until(lambda: at.prefill.cancels.get(1) == at.decode.cancels.get(1) == "client_gone")
    at.prefill.cancelled.set()
    at.decode.cancelled.set()
    at.retired()
    await at.at_rest()


async def test_a_stop_string_answers_the_room_and_stops_both_sides(at: House) -> None:
    at.prefill.script = [accepted(P), first(7), ended(P)]
    at.decode.script = [accepted(D), tokens(0, [7])]
    stream = await at.backend.generate(asked())
    await stream.next()
    await stream.hang_up(Hangup.STOP_STRING)
    assert at.entry().cause is None
    await until(lambda: at.decode.cancels.get(1) == "answered")
    at.decode.cancelled.set()
    at.retired()
    await at.at_rest()


@pytest.mark.parametrize("side", list(Side))
async def test_a_lost_worker_ends_its_rooms_with_the_cause_and_tells_the_other(at: House, side: Side) -> None:
    at.prefill.script = [accepted(P), first(7)]
    at.decode.script = [accepted(D), tokens(0, [7])]
    stream = await at.backend.generate(asked())
    await until(lambda: at.decode.called == [1])
    lost, other = (at.prefill, at.decode) if side is P else (at.decode, at.prefill)
    at.exited(lost.name, lost.pid)
    drawn, reason = await read(stream)
    assert reason == f"{side.value}_lost"
    cause = at.entry().cause
    assert cause is not None
    assert cause.text.startswith(f"{side.value} worker {lost.name}: "), (
        "not that its stream was closed for it"
    )
    assert drawn in ([], [7])
    await until(lambda: other.cancels.get(1) == f"{side.value}_lost")
    assert at.entry().waiting_for == {other.side}, "a process that is gone reports nothing"
    at.retired()
    other.cancelled.set()
    lost.cancelled.set()
    await at.at_rest()


@pytest.mark.parametrize(
    "script", [[None], [tokens(1, [8, 9], LENGTH), ended(D)]], ids=["killed", "answered"]
)
async def test_a_room_whose_stream_broke_off_ended_with_the_worker_that_is_then_known_to_be_gone(
    at: House, script: list[object]
) -> None:
    at.prefill.script = [accepted(P), first(7), ended(P)]
    at.decode.script = [accepted(D), tokens(0, [7]), *script]
    await read(await at.backend.generate(asked(3)))
    at.rooms.side_retired(at.entry().id, P)
    at.exited(at.decode.name, at.decode.pid)
    assert at.rooms.history.lost[-1].rooms == (script == [None])
    at.retired()
    await at.at_rest()


async def test_a_bug_in_following_ends_the_stream(at: House, monkeypatch: pytest.MonkeyPatch) -> None:
    at.prefill.script = [accepted(P), first(7)]

    def broken(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("baton.bootstrap.room_stream.token_from_wire", broken)
    assert await read(await at.backend.generate(asked())) == ([], "bootstrap_lost")
    at.retired()
    await at.at_rest()


async def test_without_workers_or_space_the_client_is_told_which() -> None:
    async with house(max_queue=1, queue_timeout_ms=1) as at:
        at.prefill.script = [accepted(P)]
        for _ in range(at.prefill.rooms_max):
            await at.backend.generate(asked())
        with pytest.raises(Overloaded) as error:
            await at.backend.generate(asked())
        assert error.value.retry_after_s >= 1
        at.rooms.lose(at.decode.incarnation, "gone", proof="left")
        for room in (1, 2):
            at.retired(room)
        with pytest.raises(NoWorker, match="decode"):
            await at.backend.generate(asked())


async def test_a_token_touches_neither_registry_nor_timeline_nor_metrics(
    at: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work for each token is the same however many tokens there are and however many rooms are open."""
    output = 200
    go, end, drawn = asyncio.Event(), asyncio.Event(), list(range(10, 10 + output))
    steps = [
        tokens(place, [drawn[place]], LENGTH if place == output - 1 else None) for place in range(output)
    ]
    at.prefill.script = [accepted(P), first(10), ended(P)]
    at.decode.script = [accepted(D), steps[0], go, *steps[1:-1], end, steps[-1], ended(D)]
    stream = await at.backend.generate(asked(output))
    assert (await stream.next()).tokens[0].id == drawn[0]
    await until(lambda: "prefill outcome" in at.events())
    touched: list[str] = []
    with monkeypatch.context() as patched:
        for name in ("get", "record", "mark_streaming", "workers", "rooms", "end"):
            patched.setattr(at.registry, name, lambda *_, told=name: touched.append(told))
        go.set()
        for token in drawn[1:-1]:
            assert (await stream.next()).tokens[0].id == token
    assert touched == []
    end.set()
    assert await read(stream) == (drawn[-1:], "length")
    at.retired()
    await at.at_rest()


async def test_a_room_that_has_ended_is_freed_without_a_garbage_collection(at: House) -> None:
    """A reference cycle in each room would cost the router a scan of all new objects again and again."""
    at.prefill.script = [accepted(P), first(7), ended(P)]
    at.decode.script = [accepted(D), tokens(0, [7, 8, 9], LENGTH), ended(D)]
    request = asked()
    entry = await at.admission.admit(request.request_id, request.prefill_tokens, request.tokens_max)
    gc.disable()
    try:
        room = at.backend.follow(entry, request)
        assert await read(room) == ([7, 8, 9], "length")
        await at.unfollowed()
        left = weakref.ref(room)
        del room
        await until(lambda: left() is None)
    finally:
        gc.enable()
    at.retired()
    await at.at_rest()
