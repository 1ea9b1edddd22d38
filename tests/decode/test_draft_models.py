"""Tests of draft models on decode: proposals that are worth their cost are asked for, checked and
released."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from baton.decode.draft_scheduler import DraftScheduler
from baton.decode.settings import AHEAD, DecodeSettings, Speculation
from baton.engine_interface import Proposal, Row, RowResult
from baton.engine_interface import Sequence as TokenSequence
from baton.ids import RoomId
from baton.rooms.steps.ngram_lookup import LONGEST
from baton.runtime.errors import SettingsError
from baton.runtime.setting_kinds import BadValue
from baton.wire.baton.v1 import group_pb2
from tests.decode.bench import DecodeBench, decoding
from tests.decode.test_choices import end_choice
from tests.decode.test_drafts import sizes
from tests.decode.test_growth import asked, running
from tests.prefill import toy

MAX_TOKENS = 24
CHEAP = group_pb2.StepCosts(position=1, draft=1)


class Pages:
    """A record of the proposals that were made and of those that were released."""

    def __init__(self) -> None:
        self.held: set[Proposal] = set()

    def census(self) -> Mapping[str, int]:
        return {"taken": len(self.held), "free": 9}

    def release(self, proposal: Proposal) -> None:
        proposal.over = True
        self.held.discard(proposal)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    """Pages of a draft model that proposes what the toy will draw, except every fifth token."""
    made, step, release = Pages(), toy.ToyEngine.step, toy.ToyEngine.release

    def proposing(engine: toy.ToyEngine, rows: Sequence[Row]) -> list[RowResult]:
        told = step(engine, rows)
        for row, taken in zip(rows, told, strict=True):
            proposal = row.sequence.proposal
            if proposal is None or not isinstance(taken, tuple):
                continue
            output = (*row.sequence.output, *(token.id for token in taken))
            come = toy.answer(replace(row.sequence.request, output=output))[: proposal.wanted]
            at = range(len(output), len(output) + len(come))
            proposal.tokens = tuple(token + (place % 5 == 4) for place, token in zip(at, come, strict=True))
            proposal.spent_us, proposal.draft_us = 5, 5
            if proposal.wanted and not proposal.over:
                made.held.add(proposal)
        return told

    def releasing(engine: toy.ToyEngine, sequence: TokenSequence) -> None:
        release(engine, sequence)
        if sequence.proposal is not None:
            made.release(sequence.proposal)

    monkeypatch.setattr(toy.ToyEngine, "step", proposing)
    monkeypatch.setattr(toy.ToyEngine, "release", releasing)
    return made


def drafted(bench: DecodeBench) -> tuple[float, float]:
    """Return the counts of the draft model's tokens that were taken and that were not."""
    taken, missed = (
        bench.gauge("baton_decode_draft_tokens_total", source="model", outcome=outcome)
        for outcome in ("taken", "missed")
    )
    return taken, missed


@pytest.mark.parametrize("choices", [1, 3])
async def test_drawn_is_drawn_what_a_draft_model_says_is_checked_and_the_same_comes_in_fewer_steps(
    pages: Pages, choices: int
) -> None:
    request = asked(1, 1, MAX_TOKENS, choices=choices)
    async with decoding(pages=40, drafting=DraftScheduler(ahead=4, pages=pages)) as bench:
        await bench.enter(group_pb2.Command(step_costs=CHEAP))
        caller = await running(bench, request)
        await bench.settle()
        assert await caller.outcome() == ""
        assert caller.choices == {at: toy.answer(request.choice(at)) for at in range(choices)}
        assert bench.engine.foreign == []
        taken, missed = drafted(bench)
        assert taken > missed > 0
        assert max(sizes(caller)) > 1
        assert bench.engine.steps < MAX_TOKENS - 1
        assert bench.gauge("baton_decode_draft_pages", state="taken") == 0
        bench.assert_empty()


@pytest.mark.parametrize("ends", ["answered", "cancelled"])
async def test_zero_at_idle_a_sequence_that_has_ended_has_no_pages_of_the_draft_model(
    pages: Pages, ends: str
) -> None:
    async with decoding(pages=40, drafting=DraftScheduler(ahead=4, pages=pages)) as bench:
        await bench.enter(group_pb2.Command(step_costs=CHEAP))
        bench.engine.hold()
        caller = await running(bench, asked(1, 1, MAX_TOKENS, choices=2))
        bench.engine.go(4)
        await bench.turns_until(lambda: bench.gauge("baton_decode_draft_pages", state="taken") == 2)
        assert len(pages.held) == 2
        assert bench.gauge("baton_decode_draft_pages", state="taken") == 2
        if ends == "cancelled":
            await bench.cancel(1)
        bench.engine.go()
        await bench.settle()
        assert await caller.outcome() == ("" if ends == "answered" else ends)
        assert pages.held == set()
        assert bench.gauge("baton_decode_draft_pages", state="taken") == 0


@pytest.mark.parametrize("ends", ["drawn", "cut off"])
async def test_a_choice_that_has_ended_leaves_the_draft_models_pages_to_those_that_go_on(
    pages: Pages, ends: str
) -> None:
    request = asked(1, 1, MAX_TOKENS, choices=2)
    first, second = (toy.answer(request.choice(at)) for at in range(2))
    if ends == "drawn":
        last = next(token for token in second[8:] if token not in first)
        request = replace(request, stop_token_ids=(last,))
    async with decoding(pages=40, drafting=DraftScheduler(ahead=4, pages=pages)) as bench:
        await bench.enter(group_pb2.Command(step_costs=CHEAP))
        bench.engine.hold()
        await running(bench, request)
        bench.engine.go(2)
        await bench.turns_until(lambda: len(pages.held) == 2)
        if ends == "cut off":
            await end_choice(bench, 1)
        while len(pages.held) == 2:
            assert bench.work.roster.get(RoomId(1)).ends.going_on == [0, 1]
            bench.engine.go(1)
            await bench.turns(2)
        assert bench.work.roster.get(RoomId(1)).ends.going_on == [0]
        bench.engine.go()
        await bench.settle()
        assert pages.held == set()


async def test_the_model_is_asked_for_what_is_worth_its_cost_and_the_cost_is_the_leaders(
    pages: Pages,
) -> None:
    """A position costs nothing, and a token of the draft model costs more than it can bring."""
    async with decoding(drafting=DraftScheduler(ahead=4, pages=pages)) as bench:
        dear = group_pb2.StepCosts(position=1, draft=10_000)
        await bench.enter(group_pb2.Command(step_costs=dear))
        caller = await running(bench, asked(1, 1, max_tokens=9))
        await bench.settle()
        assert caller.tokens == toy.answer(asked(1, 1, max_tokens=9))
        assert drafted(bench) == (0, 0)
        assert pages.held == set()


async def test_a_request_may_refuse_a_draft_model(pages: Pages) -> None:
    async with decoding(drafting=DraftScheduler(ahead=4, pages=pages)) as bench:
        caller = await running(bench, replace(asked(1, 1, MAX_TOKENS), speculates=False))
        await bench.settle()
        assert caller.tokens == toy.answer(asked(1, 1, MAX_TOKENS))
        assert drafted(bench) == (0, 0)


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("none", Speculation()),
        ("ngram", Speculation(LONGEST)),
        ("ngram:3", Speculation(3)),
        ("model:/models/small", Speculation(model="/models/small", ahead=AHEAD)),
        ("model:/models/small:6", Speculation(model="/models/small", ahead=6)),
        ("model:C:/models:x", Speculation(model="C:/models:x", ahead=AHEAD)),
        ("model:demo:16", Speculation(model="demo", ahead=16)),
    ],
)
def test_what_drafts_is_read_off_one_setting(text: str, means: Speculation) -> None:
    assert Speculation.parse(text) == means
    made = DecodeSettings(speculate=text, draft_memory=2**20)
    assert made.speculation == means
    files = made.draft_model
    assert (files is None) is (means.model == "")
    assert files is None or (files.model, files.kv_memory) == (means.model, 2**20)


@pytest.mark.parametrize(
    "text",
    ["", "some", "none:1", "ngram:", "ngram:1", "ngram:65", "model", "model:", "model:a:0", "model:a:17"],
)
def test_what_is_none_of_it_is_refused(text: str) -> None:
    with pytest.raises((BadValue, SettingsError)):
        Speculation.parse(text)
