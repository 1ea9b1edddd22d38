"""Tests that a request's prompt logprobs arrive once, whole, and with the first token, whatever fails."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from baton.api.backend import RoomFailed, TokenStream
from baton.fleet.room_entry import RoomEntry
from baton.rooms.request import Request, Sampling, Score
from tests.bootstrap.scripted import LENGTH, D, House, P, accepted, ended, first, house, read, scores, tokens
from tests.bootstrap.test_request_stream import PairHealth, decodes, prefills, two_pairs
from tests.patience import PATIENCE_S
from tests.wire.servers import until

TOLD = (Score(-1.0, 2, ((9, -0.5),)), Score(-0.25, 1, ((3, -0.25),)))
SCORED = Request("request-1", (1, 2, 3), 3, sampling=Sampling(temperature=0.0), prompt_logprobs=1)


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house() as made:
        yield made


@pytest.fixture
async def pairs() -> AsyncIterator[PairHealth]:
    async with two_pairs() as made:
        yield made


async def all_of(stream: TokenStream) -> tuple[list[int], list[tuple[Score, ...]]]:
    """Return all tokens of a stream, and the scores that came with each batch."""
    drawn, told = [], []
    async with asyncio.timeout(PATIENCE_S):
        while True:
            batch = await stream.next()
            drawn += [token.id for token in batch.tokens]
            told.append(batch.scores)
            if batch.finish is not None:
                return drawn, told


async def test_scores_come_with_the_first_token_and_decodes_tokens_wait_for_it(at: House) -> None:
    late = asyncio.Event()
    at.prefill.script = [accepted(P), scores(TOLD[0]), scores(TOLD[1], start=2), late, first(7), ended(P)]
    at.decode.script = [accepted(D), tokens(0, [7]), tokens(1, [8]), tokens(2, [9], LENGTH), ended(D)]
    stream = await at.backend.generate(SCORED)
    await until(lambda: "decode outcome" in at.events())
    late.set()
    drawn, told = await all_of(stream)
    assert drawn == [7, 8, 9]
    assert told[0] == TOLD
    assert not any(told[1:])
    at.retired()
    await at.at_rest()


async def test_counted_work_every_room_of_a_request_is_placed_as_one_that_scores_until_its_scores_came(
    pairs: PairHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = []
    admit = pairs.backend.rooms.admission.admit

    async def admitted(*args: Any, **named: Any) -> RoomEntry:
        placed.append(named["scores"])
        return await admit(*args, **named)

    monkeypatch.setattr(pairs.backend.rooms.admission, "admit", admitted)
    pairs.prefill.script = [accepted(P), scores(TOLD[0]), None]
    pairs.prefill_1.script = [accepted(P), scores(*TOLD), *prefills()[1:]]
    pairs.decode.script = pairs.decode_1.script = decodes()
    await all_of(await pairs.backend.generate(SCORED))
    assert placed == [2, 2]
    await pairs.all_at_rest(2, 3)


async def test_record_fits_more_log_probabilities_than_a_record_holds_come_from_prefill(at: House) -> None:
    """The record holds only some of the first token's logprobs. Decode's copy is never passed on, even if it
    is first."""
    late = asyncio.Event()
    many = Sampling(temperature=0.0, top_logprobs=15, logprob_token_ids=(1, 2, 3, 4, 5, 6))
    at.prefill.script = [accepted(P), late, first(7), ended(P)]
    at.decode.script = [accepted(D), tokens(0, [66, 8]), tokens(2, [9], LENGTH), ended(D)]
    stream = await at.backend.generate(replace(SCORED, prompt_logprobs=None, sampling=many))
    await until(lambda: "decode outcome" in at.events())
    late.set()
    assert await read(stream) == ([7, 8, 9], "length")
    at.retired()
    await at.at_rest()


async def test_scores_that_nobody_asked_for_end_the_room(at: House) -> None:
    at.prefill.script, at.decode.script = [accepted(P), scores(*TOLD), first(7)], [accepted(D)]
    _, how = await read(await at.backend.generate(replace(SCORED, prompt_logprobs=None)))
    assert how == "prefill_lost"
    at.prefill.cancelled.set()
    at.decode.cancelled.set()
    at.retired()
    await at.at_rest()


async def test_a_room_that_follows_before_the_first_token_scores_anew(pairs: PairHealth) -> None:
    """The scores of the earlier room are dropped, so that all scores are from one room."""
    stale = Score(-8.0, 8)
    pairs.prefill.script = [accepted(P), scores(stale, stale), None]
    pairs.prefill_1.script = [accepted(P), scores(*TOLD), *prefills()[1:]]
    pairs.decode.script = pairs.decode_1.script = decodes()
    drawn, told = await all_of(await pairs.backend.generate(SCORED))
    assert (drawn, [each for each in told if each]) == ([7, 8, 9], [TOLD])
    assert pairs.prefill_1.asked == [replace(SCORED, carried_tokens_max=pairs.prefill.tokens_max)]
    await pairs.all_at_rest(2, 3)


async def test_scored_once_a_room_that_follows_behind_the_first_token_scores_nothing(
    pairs: PairHealth,
) -> None:
    pairs.prefill.scripts = [[accepted(P), scores(*TOLD), first(7), ended(P)]]
    pairs.prefill.script = prefills()
    heard = asyncio.Event()
    pairs.decode.script = [accepted(D), heard, tokens(0, [7, 8]), None]
    pairs.decode_1.script = decodes()
    stream = await pairs.backend.generate(SCORED)
    batch = await stream.next()
    assert batch.scores == TOLD
    heard.set()
    drawn, told = await all_of(stream)
    assert (batch.tokens[0].id, drawn) == (7, [8, 9])
    assert not any(told)
    asks = replace(SCORED, carried_tokens_max=pairs.prefill.tokens_max)
    assert pairs.prefill.asked[1] == replace(asks, prompt_logprobs=None, output=(7, 8))
    await pairs.all_at_rest(2, 3)


async def test_a_prefill_that_is_lost_before_its_first_token_fails_what_decode_said_already(
    at: House,
) -> None:
    """Without the scores, an answer that decode completed is not passed on."""
    lost = asyncio.Event()
    at.prefill.script = [accepted(P), scores(*TOLD), lost, None]
    at.decode.script = [accepted(D), tokens(0, [7, 8, 9], LENGTH), ended(D)]
    stream = await at.backend.generate(SCORED)
    await until(lambda: "decode outcome" in at.events())
    lost.set()
    with pytest.raises(RoomFailed):
        await stream.next()
    at.retired()
    await at.at_rest()


async def test_all_choices_of_a_room_wait_for_the_prompts_scores(at: House) -> None:
    late = asyncio.Event()
    at.prefill.script = [accepted(P), scores(*TOLD), late, first(7), ended(P)]
    at.decode.script = [
        accepted(D),
        tokens(0, [5, 6], choice=1),
        tokens(0, [7, 8]),
        tokens(2, [4], LENGTH, choice=1),
        tokens(2, [9], LENGTH),
        ended(D),
    ]
    stream = await at.backend.generate(replace(SCORED, further_seeds=(5,)))
    await until(lambda: "decode outcome" in at.events())
    late.set()
    told: dict[int, list[int]] = {0: [], 1: []}
    async with asyncio.timeout(PATIENCE_S):
        batches = [await stream.next() for _ in range(5)]
    for batch in batches:
        told[batch.choice] += [token.id for token in batch.tokens]
    assert told == {0: [7, 8, 9], 1: [5, 6, 4]}
    assert [batch.scores for batch in batches] == [TOLD, (), (), (), ()]
    at.retired()
    await at.at_rest()
