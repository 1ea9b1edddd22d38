"""Tests that each backend keeps the contract of `baton.parallel.rank_group`."""

import random
from collections.abc import AsyncIterator

import pytest

from baton.parallel.rank_group import (
    BALLOT_WORDS_MAX,
    COMMAND_BYTES_MAX,
    GATHER_BYTES_MAX,
    INT64_MAX,
    INT64_MIN,
    BallotRefused,
    GroupBroken,
    RankGroup,
)
from tests.parallel.groups import BACKENDS, play


@pytest.fixture(params=BACKENDS)
async def groups(request: pytest.FixtureRequest) -> AsyncIterator[list[RankGroup]]:
    make, size = BACKENDS[request.param]
    groups = await make(size)
    yield groups
    for group in groups:
        await group.close()


async def test_ranks_are_numbered_and_know_their_size(groups: list[RankGroup]) -> None:
    assert [group.rank for group in groups] == list(range(len(groups)))
    assert {group.size for group in groups} == {len(groups)}


async def test_agree_is_the_least_of_every_place_and_equal_everywhere(groups: list[RankGroup]) -> None:
    rng = random.Random(len(groups))
    ballots = [[rng.randint(INT64_MIN, INT64_MAX) for _ in range(70)] for _ in groups]
    for ballot, extreme in zip(ballots, (INT64_MIN, INT64_MAX, 0), strict=False):
        ballot[3] = extreme

    async def script(group: RankGroup) -> object:
        mine = list(ballots[group.rank])
        agreed = await group.agree(mine)
        assert mine == ballots[group.rank]
        assert agreed is not mine
        return agreed

    least = [min(words) for words in zip(*ballots, strict=True)]
    assert await play(groups, script) == [least] * len(groups)


async def test_the_leaders_commands_reach_every_rank_in_order(groups: list[RankGroup]) -> None:
    rng = random.Random(5)
    lengths = [0, 1, 7, 1015, 1016, 1017, 1024, 1025, 100_000, 0, 3]
    commands = [rng.randbytes(length) for length in lengths]

    async def script(group: RankGroup) -> object:
        return [await group.broadcast(each if group.rank == 0 else None) for each in commands]

    assert await play(groups, script) == [commands] * len(groups)


async def test_every_rank_gathers_what_every_rank_brings_by_rank(groups: list[RankGroup]) -> None:
    rng = random.Random(6)
    lengths = [
        (0, 0, 0),
        (5, 0, 1016),
        (1016, 1017, 3),
        (70_000, 1, 1016),
        (0, 0, GATHER_BYTES_MAX),
        (1, 2, 3),
    ]
    brought = [[rng.randbytes(length) for length in each[: len(groups)]] for each in lengths]

    async def script(group: RankGroup) -> object:
        return [await group.gather(each[group.rank]) for each in brought]

    assert await play(groups, script) == [brought] * len(groups)


async def test_many_turns_of_broadcast_and_agree(groups: list[RankGroup]) -> None:
    async def script(group: RankGroup) -> object:
        heard = []
        for turn in range(100):
            heard.append(await group.broadcast(turn.to_bytes(2, "big") if group.rank == 0 else None))
            agreed = await group.agree([turn, ~turn, turn * (group.rank + 1)])
            assert agreed == [turn, ~turn, turn]
        return heard

    heard = [turn.to_bytes(2, "big") for turn in range(100)]
    assert await play(groups, script) == [heard] * len(groups)


async def test_commands_of_the_greatest_length(groups: list[RankGroup]) -> None:
    commands = random.Random(1).randbytes(COMMAND_BYTES_MAX)

    async def script(group: RankGroup) -> object:
        return await group.broadcast(commands if group.rank == 0 else None) == commands

    assert await play(groups, script) == [True] * len(groups)


async def test_a_refused_ballot_sends_nothing_and_the_group_lives_on(groups: list[RankGroup]) -> None:
    async def script(group: RankGroup) -> object:
        for bad in ([], [0] * (BALLOT_WORDS_MAX + 1), [INT64_MAX + 1], [0, INT64_MIN - 1]):
            with pytest.raises(BallotRefused):
                await group.agree(bad)
        agreed = await group.agree([1, 2])
        for bad in ([1], [1, 2, 3], [1, 1 << 64]):
            with pytest.raises(BallotRefused):
                await group.agree(bad)
        with pytest.raises(BallotRefused, match="leader"):
            await group.broadcast(None if group.rank == 0 else b"x")
        if group.rank == 0:
            with pytest.raises(BallotRefused, match="bytes of commands"):
                await group.broadcast(bytes(COMMAND_BYTES_MAX + 1))
        with pytest.raises(BallotRefused, match="bytes to gather"):
            await group.gather(bytes(GATHER_BYTES_MAX + 1))
        return agreed, await group.agree([3, 4])

    assert await play(groups, script) == [([1, 2], [3, 4])] * len(groups)


async def test_ranks_whose_first_ballots_differ_in_length_break_the_group(groups: list[RankGroup]) -> None:
    if len(groups) == 1:
        assert await groups[0].agree([0]) == [0]
        return

    async def script(group: RankGroup) -> object:
        return await group.agree([0] * (2 + group.rank))

    outcomes = await play(groups, script)
    assert [type(outcome) for outcome in outcomes] == [GroupBroken] * len(groups)
    again = await play(groups, script)
    assert [type(outcome) for outcome in again] == [GroupBroken] * len(groups)


async def test_a_rank_that_leaves_after_an_agreement_takes_no_verdict_from_the_others(
    groups: list[RankGroup],
) -> None:
    async def script(group: RankGroup) -> object:
        heard = await group.broadcast(b"leave" if group.rank == 0 else None)
        agreed = await group.agree([group.rank] * 20_000)
        await group.close()
        return heard, agreed

    assert await play(groups, script) == [(b"leave", [0] * 20_000)] * len(groups)


async def test_leaving_ends_the_group_for_everyone(groups: list[RankGroup]) -> None:
    leaver = groups[-1]

    async def script(group: RankGroup) -> object:
        await group.agree([1])
        if group is leaver:
            await group.close()
            await group.close()
        return await group.agree([2])

    outcomes = await play(groups, script)
    assert [type(outcome) for outcome in outcomes] == [GroupBroken] * len(groups)
    with pytest.raises(GroupBroken, match=f"rank {leaver.rank} has left the group"):
        await leaver.broadcast(b"" if leaver.rank == 0 else None)
    with pytest.raises(GroupBroken, match=f"rank {leaver.rank} has left the group"):
        await groups[0].gather(b"")
