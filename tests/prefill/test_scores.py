"""Tests of prompt logprobs: the whole prompt is computed, and its scores are sent once, before the first
token."""

from collections.abc import AsyncIterator

import pytest

from baton.prefill.prefill_room import REPLIES_MAX
from baton.rooms.request import SCORES_MAX, Score, Token
from baton.wire import conversions
from baton.wire.baton.v1 import group_pb2
from baton.wire.conversions import scores_from_wire, token_from_wire
from baton.wire.load_messages import load_from_wire
from tests.prefill import toy
from tests.prefill.bench import Caller
from tests.prefill.test_turn import Pair, computing, settle
from tests.wire.servers import until

PROMPT = tuple(range(100, 121))
"""Five whole pages of four, and a token."""
PAGES = (9, 2, 3, 4, 5, 6)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair(reuse=True, scored_tokens=6)
    yield made
    made.bench.close()


async def handed_over(pair: Pair, room: int, prompt_logprobs: int | None = None) -> Caller:
    caller = await pair.bench.run(toy.request(str(room), PROMPT, prompt_logprobs=prompt_logprobs))
    await pair.bench.grant(room, PAGES)
    await settle(pair.bench)
    assert await caller.outcome() == ""
    pair.bench.assert_empty()
    return caller


def scores_in(caller: Caller) -> list[Score]:
    told: list[Score] = []
    for reply in caller.replies:
        if reply.HasField("scores"):
            assert reply.scores.first == 1 + len(told)
            told += scores_from_wire(reply.scores)
    return told


async def test_scores_are_told_before_the_first_token_in_bounded_messages(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversions, "SCORES_A_MESSAGE", 24)
    asked = toy.request("1", PROMPT, prompt_logprobs=2)
    caller = await handed_over(pair, 1, prompt_logprobs=2)
    assert caller.heard == ["accepted", "scores", "scores", "scores", "first_token", "outcome"]
    assert scores_in(caller) == [toy.score_of(asked, each) for each in range(1, len(PROMPT))]
    assert pair.bench.gauge("baton_prefill_scored_tokens_total") == len(PROMPT) - 1
    assert pair.bench.engine.scored_most == 4, "of eight: unmeasured, each costs as much as two"


async def test_counted_work_a_short_prompt_does_not_wait_for_one_that_is_scored() -> None:
    """Scoring a token costs 13 times as much as computing it: a step of 28 scores two tokens, or one beside
    another prompt."""
    made = Pair(chunk_tokens=28, scored_tokens=28)
    bench = made.bench
    costs = group_pb2.StepCosts(position=10, draft=1, scored=130)
    await bench.enter(group_pb2.Command(step_costs=costs))
    bench.engine.hold()
    asked = toy.request("1", PROMPT, prompt_logprobs=2)
    scored = await bench.run(asked)
    await bench.grant(1, PAGES)
    await computing(bench)
    short = await bench.run(toy.request("2", PROMPT[:8]))
    await bench.grant(2, (7, 8), slot=1)
    await bench.turns(2)
    for _ in range(2):
        bench.engine.go(1)
        await bench.step_end()
        await bench.turn()
    await until(lambda: "first_token" in short.heard)
    assert "first_token" not in scored.heard
    bench.engine.go()
    await settle(bench)
    assert bench.engine.scored_most == 2
    assert scores_in(scored) == [toy.score_of(asked, each) for each in range(1, len(PROMPT))]
    bench.assert_empty()
    bench.close()


async def test_counted_work_what_steps_take_is_measured_by_what_they_score(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[int, int]] = []
    monkeypatch.setattr(
        pair.bench.work.scheduler.cost,
        "note",
        lambda positions, ms, scored=0: noted.append((positions, scored)),
    )
    await handed_over(pair, 1, prompt_logprobs=2)
    assert len(noted) > 1
    assert sum(positions for positions, _ in noted) == len(PROMPT)
    assert sum(scored for _, scored in noted) == len(PROMPT) - 1


async def test_counted_work_what_a_worker_says_of_its_load_has_what_is_scored() -> None:
    made = Pair(chunk_tokens=28, scored_tokens=28)
    bench = made.bench
    costs = group_pb2.StepCosts(position=10, draft=1, scored=130)
    await bench.enter(group_pb2.Command(step_costs=costs))
    await bench.run(toy.request("1", PROMPT, prompt_logprobs=2))
    load = load_from_wire(bench.work.load())
    assert load.score_price == 13_000
    assert load.tokens_waiting == len(PROMPT) + 13 * (len(PROMPT) - 1)
    await bench.cancel(1)
    await settle(bench)
    bench.close()


@pytest.mark.parametrize("top", [0, 1, 300])
def test_no_prompt_has_more_to_say_than_a_room_can(top: int) -> None:
    each = Score(-1.0, 1, ((7, -1.0),) * top)
    tokens = SCORES_MAX // (1 + top)
    messages = list(conversions.scores_to_wire([each] * tokens))
    assert len(messages) <= REPLIES_MAX - 4
    assert sum(len(message.logprobs) for message in messages) == tokens
    assert max(message.ByteSize() for message in messages) < 2**16


async def test_scored_is_computed_a_prompt_that_is_scored_begins_with_nothing_that_was_kept(
    pair: Pair,
) -> None:
    """The pages that it computes are cached for other requests all the same."""
    await handed_over(pair, 1)
    caller = await handed_over(pair, 1001, prompt_logprobs=0)
    assert len(scores_in(caller)) == len(PROMPT) - 1
    assert caller.replies[-2].first_token.cached_tokens == 0
    assert pair.bench.gauge("baton_prefill_tokens_total") == 2 * len(PROMPT)
    assert pair.bench.gauge("baton_prefix_reused_tokens_total") == 0
    caller = await handed_over(pair, 2001)
    assert caller.replies[1].first_token.cached_tokens == 20


async def test_of_a_prompt_of_one_token_there_is_nothing_to_score(pair: Pair) -> None:
    caller = await pair.bench.run(toy.request("1", (7,), prompt_logprobs=1))
    await pair.bench.grant(1, (3,))
    await settle(pair.bench)
    assert caller.heard == ["accepted", "first_token", "outcome"]


async def test_record_fits_what_a_record_cannot_hold_the_caller_alone_is_told(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tuple((each, -float(each)) for each in range(30))
    monkeypatch.setattr(pair.bench.engine, "_row", lambda row: (Token(7, -0.5, top),) if row.sample else ())
    asked = toy.request("1", PROMPT, top=30)
    caller = await pair.bench.run(asked)
    await pair.bench.grant(1, PAGES)
    await settle(pair.bench)
    assert token_from_wire(caller.replies[1].first_token.token) == Token(7, -0.5, top)
    record = pair.receiver.record(0, 1, 5)
    assert record is not None
    assert [each for each, _ in record.alternatives] == list(range(20))
