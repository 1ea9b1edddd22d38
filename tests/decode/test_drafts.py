"""Tests of drafted tokens: they equal the tokens of plain decoding, and take no pages from other rooms."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.decode.drafter import Drafter
from baton.engine_interface import Sequence as Tokens
from baton.ids import RoomId
from baton.rooms.request import Grammar, GrammarKind
from baton.rooms.retraction import spared
from baton.rooms.steps.draft_budget import Drafts, DraftSource, allocate_drafts
from baton.wire.baton.v1 import group_pb2, inference_pb2
from tests.decode.bench import Caller, DecodeBench, decoding
from tests.decode.test_group import grouped
from tests.decode.test_growth import asked, retracted, running
from tests.prefill import toy

LONGEST = 8
MAX_TOKENS = 24


@pytest.fixture(params=[0, 1, 3], ids="a_miss_after_{}".format)
def right(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of right drafts in each proposal. The toy repeats itself nowhere, so a real n-gram look-up would
    find none."""
    foresee(monkeypatch, request.param)
    return int(request.param)


def foresee(monkeypatch: pytest.MonkeyPatch, right: int, wrong: int = 1) -> None:
    """Make every drafter propose `right` tokens of the real answer, then `wrong` tokens that differ from
    it."""

    def draft(self: Drafter, most: int) -> list[int]:
        request, output = self._sequence.request, self._sequence.output
        come = toy.answer(replace(request, output=tuple(output)))[: min(most, right + wrong)]
        come = come[: request.max_tokens - len(output) - 1]
        return [*come[:right], *(token + 1 for token in come[right:])]

    monkeypatch.setattr(Drafter, "draft", draft)


def sizes(caller: Caller) -> list[int]:
    """Return the number of tokens of each message."""
    return [len(reply.tokens.tokens) for reply in caller.replies if reply.HasField("tokens")]


def drafted(bench: DecodeBench) -> tuple[float, float]:
    """Return the counts of drafts that were taken and not taken."""
    taken, missed = (
        bench.gauge("baton_decode_draft_tokens_total", source="ngram", outcome=outcome)
        for outcome in ("taken", "missed")
    )
    return taken, missed


@pytest.mark.parametrize("choices", [1, 3])
async def test_drawn_is_drawn_the_same_tokens_come_in_fewer_steps(right: int, choices: int) -> None:
    request = asked(1, 1, MAX_TOKENS, choices=choices)
    async with decoding(pages=40, drafts_by=LONGEST) as bench:
        caller = await running(bench, request)
        await bench.settle()
        assert await caller.outcome() == ""
        assert caller.choices == {at: toy.answer(request.choice(at)) for at in range(choices)}
        assert bench.engine.foreign == [], "what was not taken is written over before it is read"
        taken, missed = drafted(bench)
        assert missed > 0
        assert (taken > 0) is (max(sizes(caller)) > 1) is (right > 0)
        assert bench.gauge("baton_decode_tokens_total") == choices * MAX_TOKENS - 1
        if right:
            assert bench.engine.steps < MAX_TOKENS - 1
        bench.assert_empty()


async def test_an_answer_that_ends_in_the_middle_of_what_was_taken_ends_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    foresee(monkeypatch, right=8)
    whole = toy.answer(asked(1, 1, MAX_TOKENS))
    for last in range(1, 9):
        request = replace(asked(1, 1, MAX_TOKENS), stop_token_ids=(whole[last],))
        async with decoding(drafts_by=LONGEST, reuse=True) as bench:
            caller = await running(bench, request)
            await bench.settle()
            assert await caller.outcome() == ""
            assert caller.tokens == whole[: last + 1]
            assert caller.replies[-2].tokens.finish == inference_pb2.FINISH_REASON_STOP
            bench.assert_empty()


async def test_what_is_kept_is_what_was_taken(right: int) -> None:
    """Another room begins with all whole blocks of the first. The toy model checks that each position is
    right."""
    request = asked(1, 1, MAX_TOKENS)
    async with decoding(drafts_by=LONGEST, reuse=True) as bench:
        await running(bench, request)
        await bench.settle()
        told = (*request.prompt, *toy.answer(request))
        again = asked(1001, 2, prompt=(*told, 5), max_tokens=4)
        caller = await bench.stream(again)
        grant = await bench.granted(1001)
        computed = len(told) - 1
        assert grant.prefix_tokens == computed - computed % toy.PAGE_TOKENS
        bench.land(again)
        await bench.settle()
        assert caller.tokens == toy.answer(again)
        assert bench.engine.foreign == []


@pytest.mark.parametrize("pages", [6, 8])
async def test_drafts_make_way_no_room_is_retracted_for_wrong_ones(
    pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts that are all rejected, no more rooms are retracted than without, wherever answers end in a
    page. Both rooms begin with the same step. (Right drafts bring a room on, so that it needs pages sooner.)
    """
    foresee(monkeypatch, 0, wrong=8)
    for length in range(2, 2 + toy.PAGE_TOKENS):
        requests = [
            asked(1, arrived_ms=5, max_tokens=14, prompt=(1,) * length),
            asked(2, arrived_ms=9, max_tokens=6),
        ]
        counts: list[float] = []
        for drafts_by in (0, LONGEST):
            async with decoding(pages=pages, drafts_by=drafts_by) as bench:
                await bench.enter(group_pb2.Command(step_costs=group_pb2.StepCosts(position=1, draft=1)))
                callers = [await bench.stream(each) for each in requests]
                for each in requests:
                    await bench.granted(int(each.request_id))
                for each in requests:  # in one turn, so that both begin with the same step
                    bench.land(each)
                await bench.settle()
                counts.append(retracted(bench))
                for caller, request in zip(callers, requests, strict=True):
                    told = caller.tokens
                    assert told == toy.answer(request)[: len(told)]
                bench.assert_empty()
        assert counts[1] <= counts[0], f"a prompt of {length}"


async def test_drafts_make_way_the_pages_that_those_that_run_may_need_next_are_left() -> None:
    """One page stays free for each of two rooms that grow. Drafts get the pages beyond that."""
    for spare, given in ((0, 0), (1, 1)):
        async with decoding(pages=6 + spare, drafts_by=LONGEST) as bench:
            bench.engine.hold()
            for room in (1, 2):
                await running(bench, asked(room, room))
            assert bench.holdings.available == (2 + spare,)
            held = bench.work.roster.get(RoomId(1))
            covered = held.covered[0]
            assert bench.receiving.reach(held, 0, covered) == (covered, 0), "these it has"
            assert bench.receiving.reach(held, 0, covered + 1) == (covered + given, given)
            bench.engine.go()
            await bench.settle()
            bench.assert_empty()


@pytest.mark.parametrize(
    ("pages", "free", "margin", "may"),
    [
        ((1,), (3,), (2,), True),
        ((1,), (2,), (2,), False),
        ((1,), (1,), (), True),
        ((1, 2), (5, 3), (1, 2), False),
    ],
)
def test_drafts_leave_what_those_that_run_may_need_next(
    pages: Sequence[int], free: Sequence[int], margin: Sequence[int], may: bool
) -> None:
    assert spared(tuple(pages), tuple(free), tuple(margin)) is may


async def test_ranks_draft_the_same_whatever_each_has_seen(right: int) -> None:
    requests = [asked(1, 1, MAX_TOKENS), asked(2, 2, MAX_TOKENS, choices=2)]
    async with grouped(pages=40, drafts_by=LONGEST) as group:
        callers = [await group.stream(each) for each in requests]
        for request in requests:
            await group.granted(int(request.request_id))
            for rank in group.ranks:
                rank.land(request)
        await group.settle()
        for caller, request in zip(callers, requests, strict=True):
            assert await caller.outcome() == ""
            assert caller.choices == {at: toy.answer(request.choice(at)) for at in range(request.choices)}
        counts = {drafted(rank) for rank in group.ranks}
        assert len(counts) == 1
        assert (counts.pop()[0] > 0) is (right > 0)


async def test_a_request_may_refuse_drafts_and_a_worker_has_none_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    foresee(monkeypatch, right=3)
    refusing = replace(asked(1, 1, MAX_TOKENS), speculates=False)
    for drafts_by, request in ((LONGEST, refusing), (0, asked(1, 1, MAX_TOKENS))):
        async with decoding(drafts_by=drafts_by) as bench:
            caller = await running(bench, request)
            await bench.settle()
            assert caller.tokens == toy.answer(request)
            assert drafted(bench) == (0, 0)


async def test_all_go_by_the_cost_that_the_leader_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's cost of a position is more than it can bring, so that no rank drafts any more."""
    foresee(monkeypatch, right=3)
    async with decoding(drafts_by=LONGEST) as bench:
        await bench.enter(group_pb2.Command(step_costs=group_pb2.StepCosts(position=10_000, draft=1)))
        caller = await running(bench, asked(1, 1, max_tokens=9))
        await bench.settle()
        assert caller.tokens == toy.answer(asked(1, 1, max_tokens=9))
        assert drafted(bench) == (0, 0)


async def test_a_long_prompt_is_read_beside_steps_and_what_it_repeats_is_drafted() -> None:
    """The n-gram lookup alone is tested. The prompt repeats itself in a way that the toy model would never
    draw."""
    drafts: list[list[int]] = []
    request = asked(1, 1, 8, prompt=(1, 2, 3, 4, 5, 6, 1, 2, 3))
    drafter = Drafter(Tokens(request, [4, 5]), LONGEST)
    assert drafter.unread == 11
    while drafter.read(4):
        drafts.append(drafter.draft(3))
    assert drafter.unread == 0
    assert drafts[-1] == [6, 1, 2]
    assert len(drafter.drafts()) == request.max_tokens - 2 - 1, "no further than its answer may be"


def test_what_is_forced_comes_before_what_repeats_itself_and_no_further_than_the_answer_may() -> None:
    request = asked(1, 1, 8, prompt=(1, 2, 3, 4, 5, 6, 1, 2, 3))
    grammar = Grammar(GrammarKind.REGEX, "a+")
    free, held = (Tokens(replace(request, grammar=each), [4, 5]) for each in (None, grammar))
    drafters = [Drafter(each, LONGEST) for each in (free, held)]
    assert free.proposal is None, "nobody asks the engine"
    assert held.proposal is not None
    assert [[*each.drafts()] for each in drafters] == [[6, 1, 2, 3, 4]] * 2
    held.proposal.tokens, held.proposal.forced = tuple(range(20, 29)), 9
    before = drafters[1].acceptance.chance
    assert [*drafters[1].drafts()] == [20, 21, 22, 23, 24]
    source: DraftSource = drafters[1].source
    assert source is DraftSource.GRAMMAR
    drafters[1].note(5, 5)
    assert drafters[1].acceptance.chance == before, "it says nothing of what repeats itself"
    held.proposal.tokens, held.proposal.forced = (), 0
    assert [*drafters[1].drafts()] == [6, 1, 2, 3, 4]
    source = drafters[1].source
    assert source is DraftSource.NGRAM


async def test_what_is_forced_is_checked_whatever_a_position_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy proposes the tokens that it will draw, as a grammar does with tokens that it forces."""

    def drafts(self: Drafter) -> Sequence[int]:
        self.source = DraftSource.GRAMMAR
        request, output = self._sequence.request, self._sequence.output
        come = toy.answer(replace(request, output=tuple(output)))
        return come[: min(5, request.max_tokens - len(output) - 1)]

    monkeypatch.setattr(Drafter, "drafts", drafts)
    async with decoding(drafts_by=LONGEST) as bench:
        await bench.enter(group_pb2.Command(step_costs=group_pb2.StepCosts(position=10_000, draft=1)))
        caller = await running(bench, asked(1, 1, MAX_TOKENS))
        await bench.settle()
        assert caller.tokens == toy.answer(asked(1, 1, MAX_TOKENS))
        counts = [
            bench.gauge("baton_decode_draft_tokens_total", source="grammar", outcome=outcome)
            for outcome in ("taken", "missed")
        ]
        assert counts == [19, 0]
        assert drafted(bench) == (0, 0)


async def test_a_step_that_computes_a_prompt_too_is_longer_by_that_for_its_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts are allotted for the longer step. Its duration is no measurement of the cost of a position."""
    seen: list[tuple[int, int]] = []

    def noting(drafts: Sequence[Drafts], rows: int, positions: int, cost: int) -> list[int]:
        seen.append((rows, positions))
        return allocate_drafts(drafts, rows, positions, cost)

    monkeypatch.setattr("baton.decode.draft_scheduler.allocate_drafts", noting)
    local = asked(2, 2, 1, prompt=tuple(range(30)))
    async with decoding(pages=40, drafts_by=LONGEST) as bench:
        bench.engine.hold()
        caller = await running(bench, asked(1, 1, MAX_TOKENS))
        computed = await bench.stream(local, prefill=0)
        bench.engine.go()
        await bench.settle()
        assert caller.tokens == toy.answer(asked(1, 1, MAX_TOKENS))
        assert computed.tokens == toy.answer(local)
        assert sum(positions - rows for rows, positions in seen) == len(local.prompt)
