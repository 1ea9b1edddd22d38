"""Tests of the turns of a prefill worker: steps, pushes, seals, cancels, deadlines and draining."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.handover.turn import Lap
from baton.ids import RoomId
from baton.pages.errors import Truncated
from baton.prefill.prefill_work import LOOKS_MAX
from baton.rooms.errors import (
    Cause,
    LocalBug,
    NotConnected,
    PeerFault,
    Reason,
    Refusal,
    RoomExists,
)
from baton.rooms.evidence import Failed
from baton.rooms.phases import Effect, Phase, SenderEffect
from baton.rooms.request import Request
from baton.rooms.room import Room
from baton.rooms.steps.step_cost import PROMPTS, SENT_STEPS
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.transfer_faults import NO_FAULTS, FaultPlan
from baton.wire.baton.v1 import group_pb2, rooms_pb2
from baton.wire.conversions import Malformed
from baton.worker.mailbox import Mailbox
from baton.worker.step_thread import STEP_MS
from tests.prefill import toy
from tests.prefill.bench import DEADLINE_MS, DECODE, PrefillBench, Receiver
from tests.wire.servers import until

PROMPT = tuple(range(100, 110))
GRANTED = (9, 2, 3)


class Pair:
    def __init__(self, plan: FaultPlan = NO_FAULTS, **more: Any) -> None:
        self.fabric = MemoryFabric(plan)
        self.receiver = Receiver(self.fabric)
        self.bench = PrefillBench(self.fabric, **more)
        self.bench.connect(self.receiver)

    @property
    def transfer_quiet(self) -> bool:
        return self.bench.transfer.pending(DECODE) == 0 and self.fabric.puts_under_way == 0


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    made.bench.close()


@pytest.fixture
async def slow() -> AsyncIterator[Pair]:
    """A pair in which every write takes long."""
    made = Pair(FaultPlan(hold_share=1.0, hold_steps=100))
    yield made
    made.bench.close()


async def computing(bench: PrefillBench) -> None:
    """Take turns until a step runs."""
    for _ in range(20):
        if not bench.step_thread.free:
            return
        await bench.turn()
    raise AssertionError("no step was started")


async def settle(bench: PrefillBench) -> None:
    """Take turns and await steps until every room has retired."""
    for _ in range(500):
        if not len(bench.work.roster):
            return
        if not bench.step_thread.free:
            await bench.step_end()
        await bench.turn()
    raise AssertionError(f"rooms are left: {bench.work.roster.census()}")


async def test_a_room_is_computed_in_chunks_pushed_sealed_reported_and_forgotten(pair: Pair) -> None:
    bench, request = pair.bench, toy.request("1", PROMPT)
    caller = await bench.run(request)
    assert bench.gauge("baton_prefill_bootstrap_queue_requests") == 1
    assert bench.engine.steps == 0, "there is no destination yet"
    await bench.grant(1, GRANTED, slot=1)
    await settle(bench)
    assert await caller.outcome() == ""
    assert caller.heard == ["accepted", "first_token", "outcome"]
    assert caller.replies[1].first_token.token.token == toy.answer(request)[0]
    record = pair.receiver.record(1, 1, 5)
    assert record is not None
    assert (record.first_token, record.prompt_tokens, record.pages) == (toy.answer(request)[0], 10, (3,))
    whole = toy.read(bench.engine.memory.address, 3 * toy.GROUP.page_bytes)
    assert b"".join(map(pair.receiver.page, GRANTED)) == whole
    assert bench.gauge("baton_kv_transfer_bytes_total") == 3 * toy.GROUP.page_bytes
    assert bench.engine.steps == 2
    assert bench.gauge("baton_step_seconds_count") == 2
    assert bench.gauge("baton_prefill_first_token_seconds_count") == 1
    assert bench.told(1) == [
        "accepted",
        "destination known",
        "computing",
        "chunk computed",
        "first token",
        "written",
        "sealed",
        "retired",
    ]
    bench.assert_empty()


async def test_however_many_chunks_a_prompt_has_few_lines_tell_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines of later events still find space in the timeline."""
    monkeypatch.setattr("baton.prefill.prefill_scheduler.CHUNK_LINES_MAX", 3)
    made = Pair(chunk_tokens=1)
    await made.bench.run(toy.request("1", PROMPT))
    await made.bench.grant(1, GRANTED, slot=1)
    await settle(made.bench)
    assert made.bench.engine.steps == len(PROMPT)
    assert 1 <= made.bench.told(1).count("chunk computed") <= 3
    made.bench.close()


async def test_the_first_chunk_leaves_while_the_second_is_computed(pair: Pair) -> None:
    bench = pair.bench
    bench.engine.hold()
    bench.engine.go(1)
    await bench.run(toy.request("1", PROMPT))
    await bench.grant(1, GRANTED)
    await compute(bench, 8)
    await bench.turns(8)
    assert not bench.step_thread.free, "the second chunk is being computed"
    assert pair.receiver.page(GRANTED[0]) != bytes(toy.GROUP.page_bytes)
    assert pair.receiver.page(GRANTED[2]) == bytes(toy.GROUP.page_bytes)
    bench.engine.go()
    await settle(bench)


async def test_what_is_under_way_is_looked_at_without_a_pause_for_a_while(
    slow: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most writes end sooner than the shortest pause. Slower ones are polled once in a while."""
    bench, rested = slow.bench, 0

    async def rest(mailbox: Mailbox, bound_s: float) -> bool:
        nonlocal rested
        rested += 1
        return False

    await bench.run(toy.request("1", PROMPT[:8]))
    await bench.grant(1, GRANTED[:2])
    await compute(bench, 8)
    await bench.turns(4)
    assert slow.fabric.puts_under_way > 0
    with monkeypatch.context() as patched:
        patched.setattr(Mailbox, "rest", rest)
        for _ in range(LOOKS_MAX):
            await bench.work.rest()
        assert rested == 0
        await bench.work.rest()
        assert rested == 1
    await settle(bench)


async def test_the_first_token_leaves_before_its_pages_do(pair: Pair) -> None:
    bench = pair.bench
    bench.engine.hold()
    caller = await bench.run(toy.request("1", PROMPT[:8]))
    await bench.grant(1, GRANTED[:2])
    while bench.step_thread.free:
        await bench.turn()
    bench.engine.go()
    await bench.step_end()
    await bench.turn()
    await until(lambda: caller.heard == ["accepted", "first_token"])
    push = bench.work.roster.get(RoomId(1)).push
    assert not any(push.in_flight.values()), "posting a page may take as long as copying it"
    assert bench.gauge("baton_kv_transfer_bytes_total") == 0
    await bench.turns(2)
    assert bench.gauge("baton_kv_transfer_bytes_total") > 0
    await settle(bench)


async def test_pages_that_the_receiver_holds_are_not_sent_and_a_full_hit_sends_none(pair: Pair) -> None:
    bench = pair.bench
    await bench.run(toy.request("1", PROMPT))
    await bench.run(toy.request("2", PROMPT[:8]))
    await bench.grant(1, GRANTED[1:], prefix=4)
    await bench.grant(2, (), prefix=8, slot=1)
    await settle(bench)
    assert bench.gauge("baton_kv_transfer_bytes_total") == 2 * toy.GROUP.page_bytes
    assert pair.receiver.page(GRANTED[0]) == bytes(toy.GROUP.page_bytes)
    assert pair.receiver.record(1, 2, 5) is not None
    bench.assert_empty()


async def test_without_a_connection_the_receiver_is_told_to_connect(pair: Pair) -> None:
    bench = pair.bench
    bench.transfer.disconnect(DECODE)
    await bench.run(toy.request("1", PROMPT))
    with pytest.raises(NotConnected):
        await bench.grant(1, GRANTED)
    bench.connect(pair.receiver)
    await bench.grant(1, GRANTED)
    await settle(bench)
    assert pair.receiver.record(0, 1, 5) is not None


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (toy.request("1", (1, toy.VOCABULARY)), "outside the vocabulary"),
        (toy.request("1", (1,), 4, output=(1, toy.VOCABULARY)), "output has an id outside the vocabulary"),
        (toy.request("1", (1,), toy.CONTEXT + 1), "context"),
        (toy.request("1", range(100)), "never holds it"),
        (toy.request("1", (1,), 100, output=range(99)), "never holds it"),
        (toy.request("1", (1,), 3, output=(4, 5, 6)), "output answers the request already, with 3 tokens"),
        (toy.request("1", ()), "prompt is empty"),
    ],
)
async def test_what_can_never_be_computed_is_refused_at_the_door(
    pair: Pair, request_: Request, says: str
) -> None:
    with pytest.raises(Refusal, match=says):
        await pair.bench.run(request_)
    pair.bench.assert_empty()


async def test_a_room_id_is_used_once(pair: Pair) -> None:
    bench = pair.bench
    caller = await bench.run(toy.request("1", PROMPT))
    with pytest.raises(RoomExists):
        await bench.run(toy.request("1", PROMPT))
    await bench.grant(1, GRANTED)
    await settle(bench)
    assert await caller.outcome() == "", "the second call took nothing from the first"
    with pytest.raises(RoomExists):
        await bench.run(toy.request("1", PROMPT))
    with pytest.raises(Malformed):
        await bench.run(toy.request("0", PROMPT))
    bench.assert_empty()


async def compute(bench: PrefillBench, tokens: int) -> None:
    """Take turns until this many tokens of room 1 are computed."""
    room = bench.work.roster.get(RoomId(1))
    while room.computed < tokens:
        if not bench.step_thread.free:
            await bench.step_end()
        await bench.turn()


PHASES = {
    "computing": Phase.TRANSFERRING,
    "pushing": Phase.TRANSFERRING,
}


async def reach(bench: PrefillBench, phase: str) -> None:
    """Bring room 1 to `phase`."""
    await bench.grant(1, GRANTED)
    if phase == "computing":
        bench.engine.hold()
    await bench.turns(2)
    if phase == "pushing":
        await compute(bench, len(PROMPT))
        await bench.turn()


@pytest.mark.parametrize("phase", PHASES)
async def test_a_cancel_in_any_phase_gives_everything_back(slow: Pair, phase: str) -> None:
    bench = slow.bench
    caller = await bench.run(toy.request("1", PROMPT))
    await reach(bench, phase)
    assert bench.work.roster.get(RoomId(1)).phase is PHASES[phase]
    await bench.cancel(1)
    assert await caller.outcome() == "cancelled"
    if phase == "pushing":
        assert RoomId(1) in bench.work.roster, "its writes have not ended"
    if phase == "computing":
        await bench.turns(5)
        assert RoomId(1) in bench.work.roster, "a step still writes its pages"
    bench.engine.go()
    await settle(bench)
    assert slow.transfer_quiet
    bench.assert_empty()


async def test_retracted_is_no_failure_where_prefill_has_not_yet_seen_that_all_is_written(
    slow: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """Decode had the seal, decoded, and needs the pages. The room is ended here before its writes are seen to
    end."""
    caplog.set_level("INFO")
    bench = slow.bench
    caller = await bench.run(toy.request("1", PROMPT))
    await reach(bench, "pushing")
    await bench.cancel(1, Reason.RETRACTED)
    assert await caller.outcome() == "retracted"
    await settle(bench)
    assert "failed" not in bench.told(1)
    [failed] = [each for each in bench.registry.collect() if each.name == "baton_rooms_failed"]
    assert {each.value for each in failed.samples if each.name.endswith("_total")} == {0}
    assert "room failed" not in caplog.messages
    bench.assert_empty()


async def test_a_caller_that_leaves_cancels_its_room(pair: Pair) -> None:
    caller = await pair.bench.run(toy.request("1", PROMPT))
    caller.task.cancel()
    await settle(pair.bench)
    pair.bench.assert_empty()


async def test_close_is_answered_only_when_every_write_has_ended(slow: Pair) -> None:
    bench = slow.bench
    await bench.run(toy.request("1", PROMPT))
    await reach(bench, "pushing")
    closed = bench.closing(1)
    for _ in range(400):
        if closed.done():
            break
        assert slow.fabric.puts_under_way > 0 or RoomId(1) in bench.work.roster
        await bench.turn()
    await closed
    assert slow.transfer_quiet
    assert slow.receiver.record(0, 1, 5) is None
    bench.assert_empty()


async def test_what_a_peer_says_that_does_not_fit_is_refused_and_ends_nothing(pair: Pair) -> None:
    bench = pair.bench
    caller = await bench.run(toy.request("1", PROMPT))
    with pytest.raises(Truncated, match="2 pages granted, 3"):
        await bench.grant(1, GRANTED[:2])
    await bench.grant(1, GRANTED)
    closed = bench.closing(1, receiver=23)
    await bench.turns(2)
    with pytest.raises(PeerFault):
        await closed
    await settle(bench)
    assert await caller.outcome() == ""


async def test_a_wait_for_quiet_that_is_given_up_leaves_nothing_behind(pair: Pair) -> None:
    await pair.bench.run(toy.request("1", PROMPT))
    quiet = pair.bench.work.quiet(RoomId(1))
    work: Any = pair.bench.work
    assert work.closers == {1: {quiet}}
    quiet.cancel()
    await asyncio.sleep(0)
    assert work.closers == {1: set()}


async def test_a_failed_step_fails_its_rooms_and_the_next_one_serves(pair: Pair) -> None:
    bench = pair.bench
    bench.engine.fail_next = ValueError("out of memory")
    caller = await bench.run(toy.request("1", PROMPT))
    await bench.grant(1, GRANTED)
    await settle(bench)
    assert await caller.outcome() == "engine_failed"
    assert "out of memory" in caller.replies[-1].outcome.cause.text
    again = await bench.run(toy.request("2", PROMPT))
    await bench.grant(2, GRANTED)
    await settle(bench)
    assert await again.outcome() == ""
    bench.assert_empty()


async def test_a_sequence_without_a_token_fails_its_room_alone(pair: Pair) -> None:
    bench = pair.bench
    asked = [toy.request(room, PROMPT) for room in ("1", "2")]
    bench.engine.broken.add(toy.mark(asked[0]))
    callers = [await bench.run(each) for each in asked]
    for room in (1, 2):
        await bench.grant(room, GRANTED)
    await settle(bench)
    assert [await caller.outcome() for caller in callers] == ["engine_failed", ""]
    bench.assert_empty()


async def test_a_step_that_takes_longer_than_a_deadline_is_progress_for_all_who_wait_for_it(
    pair: Pair,
) -> None:
    """If a chunk takes minutes and this did not count, each prompt and each retry would fail."""
    bench = pair.bench
    bench.engine.hold()
    callers = [await bench.run(toy.request(room, PROMPT)) for room in ("1", "2")]
    for room in (1, 2):
        await bench.grant(room, GRANTED)
    await computing(bench)
    for _ in range(5):
        bench.clock.advance(DEADLINE_MS - 1)
        await bench.turn()
    bench.engine.go()
    await settle(bench)
    assert [await caller.outcome() for caller in callers] == ["", ""]
    bench.assert_empty()


async def test_deadline_everywhere_a_step_that_hangs_is_no_progress(pair: Pair) -> None:
    bench = pair.bench
    bench.engine.hold()
    caller = await bench.run(toy.request("1", PROMPT))
    await bench.grant(1, GRANTED)
    await computing(bench)
    bench.clock.advance(STEP_MS)
    await bench.turn()
    bench.clock.advance(DEADLINE_MS)
    for _ in range(3):
        await bench.turn()
    assert "outcome" in caller.heard
    bench.engine.go()
    await settle(bench)
    assert await caller.outcome() == "deadline"
    bench.assert_empty()


async def test_a_departed_receiver_ends_its_rooms_and_is_forgotten(slow: Pair) -> None:
    bench = slow.bench
    caller = await bench.run(toy.request("1", PROMPT))
    await reach(bench, "pushing")
    slow.fabric.kill(DECODE)
    await bench.enter(group_pb2.Command(departed=DECODE))
    assert await caller.outcome() == "decode_lost"
    await settle(bench)
    assert not bench.transfer.connected(DECODE)
    bench.assert_empty()


async def test_a_write_that_fails_ends_its_room_alone() -> None:
    pair = Pair(FaultPlan(seed=3, fail_share=1.0))
    caller = await pair.bench.run(toy.request("1", PROMPT))
    await pair.bench.grant(1, GRANTED)
    await settle(pair.bench)
    assert await caller.outcome() == "transfer_failed"
    pair.bench.assert_empty()
    pair.bench.close()


async def test_a_draining_worker_leaves_when_it_holds_nothing_and_nothing_waits(pair: Pair) -> None:
    bench = pair.bench
    await bench.run(toy.request("1", PROMPT))
    bench.mailbox.put(group_pb2.Command(drain=True))
    assert await bench.turn() is not Lap.LAST
    assert bench.work.draining
    await bench.grant(1, GRANTED)
    await settle(bench)
    bench.mailbox.put(group_pb2.Command(departed=DECODE))
    assert not bench.work.may_leave(), "a command waits"
    while await bench.turn() is not Lap.LAST:
        pass
    bench.assert_empty()


async def test_secrets_unlogged_a_timeline_tells_how_many_tokens_and_never_which(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    await pair.bench.run(toy.request("1", PROMPT))
    await pair.bench.grant(1, GRANTED)
    await settle(pair.bench)
    waiting: Any = pair.bench.reporter
    told = [rooms_pb2.RoomEvent.FromString(each.event) for each in waiting.pending]
    lines = [f"{each.name}: {each.detail}" for each in told] + caplog.messages
    assert any(line.startswith("accepted: 10 ") for line in lines)
    for line in lines:
        assert not any(str(token) in line for token in PROMPT), line


async def test_a_turn_that_breaks_tells_every_room_that_it_ended_why_and_none_twice(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rooms are settled before the first caller is told, so a room's phase does not show which were
    told."""
    rooms = (1, 2, 3)
    callers = [await pair.bench.run(toy.request(f"{room}", PROMPT)) for room in rooms]
    work: Any = pair.bench.work
    replies = [work.roster.get(RoomId(room)).replies for room in rooms]
    break_at(monkeypatch, work, 2, Effect.FENCE)
    for room in rooms:
        work.roster.note(RoomId(room), Failed(Cause(Reason.CONNECT_FAILED, "prefill: seen before")))
    with pytest.raises(LocalBug, match="room 2"):
        await pair.bench.turn()
    work.break_off(Cause(Reason.PREFILL_LOST, "prefill worker p ends: a bug"))
    assert [await caller.outcome() for caller in callers] == ["connect_failed"] * 3
    assert all(each.empty() for each in replies), "once"


async def test_a_room_that_is_sealed_is_handed_over_whatever_the_turn_then_breaks_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = await pair.bench.run(toy.request("1", PROMPT))
    await pair.bench.grant(1, GRANTED)
    break_at(monkeypatch, pair.bench.work, 1, SenderEffect.REPORT)
    with pytest.raises(LocalBug, match="room 1"):
        await settle(pair.bench)
    pair.bench.work.break_off(Cause(Reason.PREFILL_LOST, "prefill worker p ends: a bug"))
    assert await caller.outcome() == ""


def break_at(monkeypatch: pytest.MonkeyPatch, work: Any, room_id: int, effect: Effect | SenderEffect) -> None:
    """Make the worker raise while it acts on one room, as a bug would."""
    perform = work.perform

    def breaks(room: Room, asked: Effect | SenderEffect) -> None:
        if (room.id, asked) == (room_id, effect):
            raise LocalBug(f"a bug in what is done about room {room_id}")
        perform(room, asked)

    monkeypatch.setattr(work, "perform", breaks)


async def test_steps_are_as_long_as_the_leaders_cost_says_and_not_this_ranks_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three prompts share one step where each step is slow, and run one after the other where it is not."""
    monkeypatch.setattr("baton.worker.prompt_chunks.LOT_MIN", 1)
    for position, steps in ((1, 1), (10_000, 3)):
        made = Pair(chunk_tokens=24)
        bench = made.bench
        await bench.enter(group_pb2.Command(step_costs=group_pb2.StepCosts(position=position, draft=1)))
        bench.engine.hold()
        for name in range(4):
            await bench.run(toy.request(str(1 + name), PROMPT[:8]))
            await bench.grant(1 + name, GRANTED[:2], slot=name)
            await computing(bench)
        await bench.turns(4)
        bench.engine.go()
        await settle(bench)
        assert bench.engine.steps == 1 + steps
        made.bench.close()


async def test_what_steps_take_is_measured_and_the_leader_tells_what_all_go_by(pair: Pair) -> None:
    bench, cost = pair.bench, pair.bench.work.scheduler.cost
    assert cost.agreed == PROMPTS
    bench.engine.hold()
    await bench.run(toy.request("1", PROMPT[:8]))
    await bench.grant(1, GRANTED[:2])
    await computing(bench)
    bench.clock.advance(20)
    bench.engine.go()
    await settle(bench)
    assert cost.ms(8) == 20
    for step in range(SENT_STEPS):
        cost.note(8 * (1 + step % 4), 12.0 + 8 * (1 + step % 4))
    expected = cost.costs
    await bench.turn()
    assert cost.agreed == expected != PROMPTS
