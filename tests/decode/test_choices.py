"""Tests of rooms with several choices on decode: one hand-over of the prompt, one answer for each choice."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.ids import NO_OPENER, Opener, RoomId
from baton.pages.kv_checksum import KvChecksum
from baton.pages.pool import PageState
from baton.rooms.errors import Refusal
from baton.rooms.phases import Phase
from baton.rooms.request import Request, Sampling
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.conversions import finish_from_wire
from tests.decode.bench import Caller, DecodeBench, decoding
from tests.decode.test_group import Group, group  # noqa: F401 - a fixture
from tests.patience import PATIENCE_S
from tests.prefill import toy
from tests.prefill.bench import PAGES

PROMPT = tuple(range(200, 206))


def asked(room: int = 1, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 7, choices: int = 3) -> Request:
    sampling = Sampling(temperature=1.0, seed=11)
    made = toy.request(str(room), prompt, max_tokens, further_seeds=tuple(range(12, 11 + choices)))
    return replace(made, sampling=sampling)


ASKED = asked()


def answers(request: Request) -> dict[int, list[int]]:
    """Return the answer that each choice would get as a request of its own, by choice index."""
    return {place: toy.answer(request.choice(place)) for place in range(request.choices)}


def finishes(caller: Caller) -> dict[int, str]:
    told = {}
    for reply in caller.replies:
        finish = finish_from_wire(reply.tokens.finish)
        if finish is not None:
            told[reply.tokens.choice] = finish.value
    return told


@pytest.fixture(params=[KvChecksum.RECORD, KvChecksum.PAGES], ids=lambda each: each.value)
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[DecodeBench]:
    async with decoding(checksum=request.param) as made:
        yield made


async def started(bench: DecodeBench, request: Request = ASKED) -> Caller:
    caller = await bench.stream(request)
    await bench.granted(int(request.request_id))
    return caller


async def end_choice(bench: DecodeBench, choice: int, room: int = 1, opener: Opener = NO_OPENER) -> None:
    ended = inference_pb2.EndChoiceRequest(room=room, choice=choice, opener=opener)
    await bench.enter(group_pb2.Command(end_choice=ended))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
async def test_own_draws_each_choice_is_answered_as_a_request_of_its_own(
    bench: DecodeBench, length: int
) -> None:
    request = asked(prompt=PROMPT[:length] if length < 6 else tuple(range(length)), choices=3)
    caller = await started(bench, request)
    bench.land(request)
    await bench.settle()
    assert await caller.outcome() == ""
    assert caller.choices == answers(request)
    assert len(set(map(tuple, caller.choices.values()))) == 3
    assert finishes(caller) == dict.fromkeys(range(3), "length")
    bench.assert_empty()


async def test_the_sender_is_granted_the_prompts_pages_once(bench: DecodeBench) -> None:
    await started(bench)
    assert len(bench.sender.grants[1].pages[0].pages) == bench.pages(PageState.EXPOSED) == 2
    assert bench.pages(PageState.RESERVED) == 1, "a head start; the other choices take theirs as they begin"
    assert bench.sender.granted_at_once == [1]
    bench.land(ASKED)
    await bench.settle()
    assert len(bench.sender.grants) == 1
    bench.assert_empty()


async def test_choices_end_alone_one_by_one_and_the_room_with_the_last(
    bench: DecodeBench,
) -> None:
    first, second, third = answers(ASKED).values()
    stop = next(token for token in first[1:-1] if token not in second and token not in third)
    request = replace(ASKED, stop_token_ids=(stop,))
    caller = await started(bench, request)
    bench.land(request)
    await bench.turns_until(lambda: 0 in finishes(caller))
    assert bench.phase(1) is Phase.SUCCESS
    await bench.settle()
    assert caller.choices == {0: first[: first.index(stop) + 1], 1: second, 2: third}
    assert finishes(caller) == {0: "stop", 1: "length", 2: "length"}
    drawn = sum(map(len, caller.choices.values()))
    assert bench.gauge("baton_decode_tokens_total") == drawn - 1, "nothing for what has ended"
    bench.assert_empty()


async def test_the_others_go_on_where_the_first_token_is_choice_0s_last(bench: DecodeBench) -> None:
    first, second, third = answers(ASKED).values()
    assert first[0] not in second + third
    request = replace(ASKED, stop_token_ids=(first[0],))
    caller = await started(bench, request)
    bench.land(request)
    await bench.settle()
    assert caller.choices == {0: first[:1], 1: second, 2: third}
    bench.assert_empty()


async def test_choices_of_one_token_each(bench: DecodeBench) -> None:
    request = asked(max_tokens=1)
    caller = await started(bench, request)
    bench.land(request)
    await bench.settle()
    assert caller.choices == answers(request)
    assert bench.engine.steps == 1
    bench.assert_empty()


async def test_a_later_room_goes_on_with_all_choices_behind_what_was_drawn(bench: DecodeBench) -> None:
    request = replace(ASKED, output=tuple(PROMPT[:3]))
    caller = await bench.stream(request)
    await bench.granted(1)
    assert bench.work.roster.get(RoomId(1)).division.known_tokens == 9
    sent = replace(request, prompt=request.prompt + request.output, output=())
    bench.land(sent, first=toy.answer(request)[0])
    await bench.settle()
    drawn: dict[int, list[int]] = {}
    for reply in caller.replies:
        if reply.HasField("tokens"):
            drawn.setdefault(reply.tokens.choice, []).extend(each.token for each in reply.tokens.tokens)
    assert drawn == answers(request)
    bench.assert_empty()


async def test_a_choice_whose_reader_has_enough_ends_and_the_others_go_on(bench: DecodeBench) -> None:
    caller = await started(bench)
    bench.land(ASKED)
    bench.engine.hold()
    await bench.turns_until(lambda: not bench.step_thread.free)
    await end_choice(bench, 1)
    await end_choice(bench, 1)
    bench.engine.go()
    await bench.settle()
    assert await caller.outcome() == ""
    right = answers(ASKED)
    assert caller.choices == {0: right[0], 2: right[2]}, "what its step drew is not told"
    bench.assert_empty()


async def test_choices_end_alone_one_that_was_cut_fails_nothing_by_its_last_step(bench: DecodeBench) -> None:
    caller = await started(bench)
    bench.land(ASKED)
    bench.engine.hold()
    await bench.turns_until(lambda: not bench.step_thread.free)
    await end_choice(bench, 1)
    bench.engine.unheld.add(ASKED.further_seeds[0])
    bench.engine.go()
    await bench.settle()
    assert await caller.outcome() == ""
    right = answers(ASKED)
    assert caller.choices == {0: right[0], 2: right[2]}
    bench.assert_empty()


async def test_a_room_whose_choices_were_all_ended_is_answered(bench: DecodeBench) -> None:
    caller = await started(bench)
    await end_choice(bench, 0)
    bench.land(ASKED)
    await bench.turns_until(lambda: set(caller.choices) == {1, 2})
    await end_choice(bench, 2)
    await end_choice(bench, 1)
    assert await caller.outcome() == ""
    await bench.settle()
    assert 0 not in caller.choices
    bench.assert_empty()


@pytest.mark.parametrize("lands", [True, False], ids=["landed", "given up"])
async def test_exits_release_all_of_choices_that_were_all_ended_before_anything_landed(
    bench: DecodeBench, lands: bool
) -> None:
    caller = await started(bench)
    for choice in range(3):
        await end_choice(bench, choice)
    assert await caller.outcome() == ""
    said = len(caller.replies)
    if lands:
        bench.land(ASKED)
    else:
        bench.sender.quiet.set()
        await bench.cancel(1)
    await bench.settle()
    assert len(caller.replies) == said
    assert "step" not in bench.engine.ran
    bench.assert_empty()


async def test_terminal_creates_nothing_of_a_room_that_is_over_no_choice_is_ended(bench: DecodeBench) -> None:
    await end_choice(bench, 0, room=77)
    caller = await started(bench)
    with pytest.raises(Refusal, match="choice 3 of a room that has 3"):
        await end_choice(bench, 3)
    await bench.cancel(1)
    assert await caller.outcome() == "cancelled"
    said = len(caller.replies)
    for choice in range(3):
        await end_choice(bench, choice)
    bench.sender.quiet.set()
    await bench.settle()
    assert len(caller.replies) == said
    bench.assert_empty()


async def test_what_a_choice_fails_by_ends_the_room(bench: DecodeBench) -> None:
    caller = await started(bench)
    bench.land(ASKED)
    bench.engine.broken.add(1)
    assert await _heard_to_the_end(bench, caller) == "engine_failed"
    bench.assert_empty()


async def test_a_step_that_fails_frees_its_room_whichever_choices_were_in_it() -> None:
    async with decoding() as bench:
        caller = await started(bench)
        bench.land(ASKED)
        bench.engine.fail_next = RuntimeError("out of luck")
        assert await _heard_to_the_end(bench, caller) == "engine_failed"
        bench.assert_empty()


async def _heard_to_the_end(bench: DecodeBench, caller: Caller) -> str:
    await bench.settle()
    return await caller.outcome()


async def test_choices_beyond_max_running_take_their_turns() -> None:
    async with decoding(max_running=2) as bench:
        request = asked(choices=4)
        caller = await started(bench, request)
        bench.engine.hold()
        bench.land(request)
        await bench.turns_until(lambda: not bench.step_thread.free)
        assert bench.gauge("baton_decode_running_requests") == 2
        assert bench.gauge("baton_decode_waiting_requests") == 2
        bench.engine.go()
        await bench.settle()
        assert caller.choices == answers(request)
        bench.assert_empty()


async def test_a_prompt_that_is_held_already_is_shared_by_all_choices() -> None:
    async with decoding(reuse=True) as bench:
        for room in (1, 1001):
            request = asked(room, prompt=tuple(range(9)))
            caller = await started(bench, request)
            assert bench.sender.grants[room].prefix_tokens == (0 if room == 1 else 8)
            bench.land(request)
            await bench.settle()
            assert caller.choices == answers(request)
            bench.assert_empty()


async def test_what_a_cut_choice_was_answered_is_not_kept() -> None:
    async with decoding(reuse=True) as bench:
        caller = await started(bench)
        bench.land(ASKED)
        await bench.turns_until(lambda: len(caller.choices.get(0, [])) > 3)
        await end_choice(bench, 0)
        await bench.settle()
        assert len(bench.holdings.prefixes) == len(PROMPT) // toy.PAGE_TOKENS
        bench.assert_empty()


async def test_admission_agreed_pages_are_counted_of_all_choices_those_that_they_share_once() -> None:
    async with decoding() as bench:
        prompt = tuple(range(8))
        most = 1 + (PAGES - 3) // 2
        caller = await started(bench, asked(1, prompt, max_tokens=4, choices=most))
        with pytest.raises(Refusal, match=f"11 tokens in each of {most + 1} choices: the cache of this"):
            await bench.stream(asked(2, prompt, max_tokens=4, choices=most + 1))
        bench.sender.quiet.set()
        await bench.cancel(1)
        assert await caller.outcome() == "cancelled"
        await bench.settle()
        bench.assert_empty()


async def test_ranks_draw_all_choices_and_give_back_together(group: Group) -> None:  # noqa: F811
    caller = await group.stream(ASKED)
    await group.granted(1)
    for each in group.ranks:
        each.land(ASKED)
    await group.settle()
    assert caller.choices == answers(ASKED)


async def test_growth_is_agreed_a_choice_that_is_cut_ends_on_all_ranks_whatever_each_has_seen(
    group: Group,  # noqa: F811
) -> None:
    """One rank has seen the step's end, and the other has not."""
    caller = await group.stream(ASKED)
    await group.granted(1)
    for each in group.ranks:
        each.land(ASKED)
    await group.turns_until(lambda: bool(caller.choices))
    group.follower.engine.hold()
    await group.turns_until(lambda: not group.leader.step_thread.free)
    group.leader.mailbox.put(group_pb2.Command(end_choice=inference_pb2.EndChoiceRequest(room=1, choice=2)))
    await group.leader.step_end()
    await group.turn()
    group.follower.engine.go()
    await group.settle()
    right = answers(ASKED)
    assert {place: caller.choices[place] for place in (0, 1)} == {0: right[0], 1: right[1]}
    assert caller.choices.get(2, []) == right[2][: len(caller.choices.get(2, []))]


@pytest.mark.parametrize("late", [0, 1], ids=["the leader", "a follower"])
async def test_admission_agreed_ranks_keep_the_same_of_a_choice_that_one_saw_end_before_it_was_cut(
    group: Group,  # noqa: F811
    late: int,
) -> None:
    """One rank saw the choice end by itself. The other, which is late, was told first that it is over."""
    request = asked(choices=2)
    caller = await group.stream(request)
    await group.granted(1)
    for each in group.ranks:
        each.land(request)
    await group.turns_until(lambda: len(caller.choices.get(0, [])) == request.max_tokens - 2)
    held, other = group.ranks[late], group.ranks[1 - late]
    drawn = [each.work.roster.get(RoomId(1)).outputs[0] for each in (held, other)]
    await asyncio.gather(*(each.step_end() for each in group.ranks if not each.step_thread.free))
    held.engine.hold()
    async with asyncio.timeout(PATIENCE_S):
        while len(drawn[1]) < request.max_tokens:
            await group.turn()
            await asyncio.sleep(0.001)
    group.leader.mailbox.put(group_pb2.Command(end_choice=inference_pb2.EndChoiceRequest(room=1, choice=0)))
    await group.turn()
    assert list(map(len, drawn)) == [request.max_tokens - 1, request.max_tokens]
    held.engine.go()
    await group.settle()
    assert caller.choices[1] == answers(request)[1]
    assert group.leader.holdings.prefixes.digest == group.follower.holdings.prefixes.digest
