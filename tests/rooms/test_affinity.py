"""Is the beginning of a prompt known where it was sent, for as long as it may be held there?"""

from dataclasses import dataclass, replace

import pytest

from services.rooms.affinity import BLOCK_TOKENS, Sent, blocks
from services.rooms.ids import Incarnation, RoomId
from services.rooms.phases import Side
from services.rooms.placement import OVERLOADED, Need
from services.rooms.registry import Registry
from tests.rooms.test_registry import facts, registry_of

PROMPT = tuple(range(1000, 1000 + 5 * BLOCK_TOKENS))
OTHER = (*PROMPT[: 2 * BLOCK_TOKENS], 7, *PROMPT[2 * BLOCK_TOKENS + 1 :])


@dataclass(frozen=True)
class Opened:
    id: RoomId
    names: tuple[str, str]


def workers(rooms_max: int = 10) -> Registry:
    return registry_of(
        *(facts(side, number, tokens_max=10_000, rooms_max=rooms_max) for side in Side for number in (1, 2))
    )


def send(stack: Registry, prompt: tuple[int, ...], tokens: int = 400) -> Opened:
    need = Need(tokens, tokens, blocks(prompt))
    entry = stack.open_room("request", stack.place(need), need, 0)
    return Opened(entry.id, (entry.prefill.name, entry.decode.name))


def test_two_prompts_share_the_blocks_that_they_share_from_the_start() -> None:
    one, other = blocks(PROMPT), blocks(OTHER)
    assert len(one) == len(other) == 5
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False, False, False]
    assert blocks(PROMPT[1:])[0] not in one
    assert len(set(one)) == 5


@pytest.mark.parametrize(("length", "count"), [(0, 0), (63, 0), (64, 1), (127, 1), (128, 2)])
def test_a_block_that_is_not_whole_is_none(length: int, count: int) -> None:
    assert len(blocks(PROMPT[:length])) == count


def test_blocks_are_the_same_in_every_process() -> None:
    assert blocks(range(64))[0].hex() == "317f2db2683b26f5364d09e2f38dc32f"


def test_the_longest_known_beginning_counts() -> None:
    sent = Sent(100 * BLOCK_TOKENS)
    sent.add(blocks(PROMPT))
    assert sent.tokens(blocks(PROMPT)) == 5 * BLOCK_TOKENS
    assert sent.tokens(blocks(OTHER)) == 2 * BLOCK_TOKENS
    assert sent.tokens(blocks(PROMPT[1:])) == 0


def test_no_more_is_remembered_than_the_cache_holds_and_ends_are_forgotten_first() -> None:
    sent = Sent(6 * BLOCK_TOKENS)
    sent.add(blocks(PROMPT))
    sent.add(blocks(tuple(range(4 * BLOCK_TOKENS))))
    assert len(sent) == 6
    assert sent.tokens(blocks(PROMPT)) == 2 * BLOCK_TOKENS


def test_the_worker_that_was_sent_the_beginning_is_preferred_on_either_side() -> None:
    stack = workers()
    first = send(stack, PROMPT)
    stack.end(first.id, None, 0)
    assert send(stack, OTHER).names == first.names
    assert send(stack, PROMPT[1:]).names != first.names


def test_an_overloaded_worker_is_not_preferred() -> None:
    stack = workers()
    first = send(stack, PROMPT, tokens=int(10_000 * OVERLOADED))
    again = send(stack, PROMPT, tokens=1)
    assert again.names == first.names
    assert send(stack, PROMPT).names != first.names


def test_a_full_worker_is_not_waited_for() -> None:
    stack = workers(rooms_max=1)
    first = send(stack, PROMPT)
    assert send(stack, PROMPT).names != first.names


def test_incarnation_what_a_worker_was_sent_is_forgotten_with_it() -> None:
    stack = workers()
    first = send(stack, PROMPT)
    gone = next(worker.facts for worker in stack.workers() if worker.facts.name == first.names[0])
    stack.leave(gone.incarnation, "exited")
    stack.register(replace(gone, incarnation=Incarnation(gone.incarnation + 1000)), 0)
    assert [worker.sent.tokens(blocks(PROMPT)) > 0 for worker in stack.workers()].count(True) == 1


def test_what_decode_may_come_to_hold_makes_no_prefill_worker_overloaded() -> None:
    """A chat that says no length may come to fill decode's cache, and takes its few tokens of prefill's."""
    stack = workers()
    need = Need(len(PROMPT), 9_000, blocks(PROMPT))
    rooms = [stack.open_room("request", stack.place(need), need, 0) for _ in range(3)]
    assert len({room.prefill.name for room in rooms}) == 1
    assert len({room.decode.name for room in rooms}) == 2


def test_there_is_a_choice_where_a_side_has_two() -> None:
    one = registry_of(facts(Side.PREFILL, 1), facts(Side.DECODE, 1))
    assert not one.has_choice
    one.register(facts(Side.DECODE, 2), 0)
    assert one.has_choice
