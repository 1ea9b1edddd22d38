"""Tests of prefix affinity: prompts go where their beginning was sent before, as long as it may be cached."""

from collections import Counter, deque
from dataclasses import dataclass, replace

import pytest

from baton.fleet.need import Need
from baton.fleet.registry import Registry
from baton.fleet.worker_record import Worker
from baton.ids import Incarnation, PageId, RoomId
from baton.pages.block_hashes import BLOCK_TOKENS, hash_blocks
from baton.pages.kv_event_log import KvEventLog
from baton.rooms.phases import Side
from tests.fleet.test_registry import LOST, facts, registry_of

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
    need = Need(tokens, tokens, hash_blocks(prompt))
    entry = stack.open_room("request", stack.place(need), need, 0)
    return Opened(entry.id, (entry.names[Side.PREFILL], entry.decode.name))


def over(stack: Registry, opened: Opened) -> None:
    stack.end(opened.id, None, 0)
    for side in Side:
        stack.side_retired(opened.id, side)


def test_two_prompts_share_the_blocks_that_they_share_from_the_start() -> None:
    one, other = hash_blocks(PROMPT), hash_blocks(OTHER)
    assert len(one) == len(other) == 5
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False, False, False]
    assert hash_blocks(PROMPT[1:])[0] not in one
    assert len(set(one)) == 5


@pytest.mark.parametrize(("length", "count"), [(0, 0), (63, 0), (64, 1), (127, 1), (128, 2)])
def test_a_block_that_is_not_whole_is_none(length: int, count: int) -> None:
    assert len(hash_blocks(PROMPT[:length])) == count


def test_same_root_only_prompts_of_two_salts_share_no_block() -> None:
    plain, one, other = (hash_blocks(PROMPT, salt) for salt in (0, 1, 2**128 - 1))
    assert len({*plain, *one, *other}) == 15
    assert hash_blocks(PROMPT, 1) == one


def test_blocks_are_the_same_in_every_process() -> None:
    assert hash_blocks(range(64))[0].hex() == "03366a5a5b3d9e06b3387c35802c119d"


def test_the_longest_known_beginning_counts() -> None:
    worker = Worker(facts(Side.PREFILL, 1, tokens_max=100 * BLOCK_TOKENS), 0)
    worker.sent_prefixes.add(hash_blocks(PROMPT))
    assert worker.cached_tokens(hash_blocks(PROMPT)) == 5 * BLOCK_TOKENS
    assert worker.cached_tokens(hash_blocks(OTHER)) == 2 * BLOCK_TOKENS
    assert worker.cached_tokens(hash_blocks(PROMPT[1:])) == 0


def test_no_more_is_remembered_than_the_cache_holds_and_ends_are_forgotten_first() -> None:
    worker = Worker(facts(Side.PREFILL, 1, tokens_max=6 * BLOCK_TOKENS), 0)
    worker.sent_prefixes.add(hash_blocks(PROMPT))
    worker.sent_prefixes.add(hash_blocks(tuple(range(4 * BLOCK_TOKENS))))
    assert len(worker.sent_prefixes) == 6
    assert worker.cached_tokens(hash_blocks(PROMPT)) == 2 * BLOCK_TOKENS


def test_the_worker_that_was_sent_the_beginning_is_preferred_on_either_side() -> None:
    stack = workers()
    first = send(stack, PROMPT)
    assert send(stack, OTHER).names != first.names, "more is spoken for there than it spares"
    over(stack, first)
    assert send(stack, PROMPT).names == first.names
    assert send(stack, PROMPT[1:]).names == first.names, "nobody was sent that: the least loaded one"


def test_a_request_is_charged_for_what_a_worker_was_not_sent_before_and_given_back_the_same() -> None:
    stack = workers()
    first = send(stack, PROMPT)
    over(stack, first)
    again, other = send(stack, PROMPT), send(stack, OTHER)
    charged = {each.facts.name: each.tokens for each in stack.workers()}
    # Prefill computes no more than that. In decode each step attends to all of it.
    assert [charged[name] for name in again.names] == [(400 - 320) + (400 - 128), 400]
    for each in (again, other):
        over(stack, each)
    assert {each.tokens for each in stack.workers()} == {0}


def test_a_worker_that_keeps_no_prefixes_is_not_thought_to_have_any() -> None:
    stack = registry_of(
        *(replace(facts(side, number), keeps_prefixes=False) for side in Side for number in (1, 2))
    )
    first = send(stack, PROMPT)
    over(stack, first)
    names = {send(stack, PROMPT).names for _ in range(2)}
    assert len(names) == 2, "by their load alone"
    assert {each.tokens for each in stack.workers()} == {400}


def test_a_conversation_stays_for_as_long_as_less_waits_there_than_it_spares() -> None:
    stack = workers()
    long = tuple(range(5_000, 5_000 + 20 * BLOCK_TOKENS))
    first = send(stack, long, tokens=1_300)
    over(stack, first)
    by_name = {worker.facts.name: worker for worker in stack.workers()}
    holders = (by_name[first.names[0]], by_name[first.names[1]])
    others = Need(len(long) - 1, len(long) - 1)
    stack.open_room("another", holders, others, 0)
    again = send(stack, long, tokens=1_300)
    assert again.names == first.names
    over(stack, again)
    stack.open_room("another", holders, Need(2, 2), 0)
    assert not set(send(stack, long, tokens=1_300).names) & set(first.names)


@pytest.mark.parametrize("shared", [0, 64, 128])
@pytest.mark.parametrize("at_a_time", [8, 32])
def test_a_short_beginning_that_all_prompts_share_does_not_bring_them_all_to_one_worker(
    shared: int, at_a_time: int
) -> None:
    """A system message is such a beginning. Each of four workers gets its share of the prompts."""
    stack = registry_of(
        *(facts(side, number, tokens_max=300_000, rooms_max=99) for side in Side for number in range(1, 5))
    )
    got, rooms = Counter[str](), deque[Opened]()
    for number in range(400):
        if len(rooms) == at_a_time:
            over(stack, rooms.popleft())
        own = range(1_000 * (number + 1), 1_000 * (number + 2) - shared)
        rooms.append(send(stack, (*range(shared), *own), tokens=1_000))
        got.update(rooms[-1].names)
    assert len(got) == 8
    assert min(got.values()) >= 80, got


def test_a_full_worker_is_not_waited_for() -> None:
    stack = workers(rooms_max=1)
    first = send(stack, PROMPT)
    assert send(stack, PROMPT).names != first.names


def test_incarnation_what_a_worker_was_sent_is_forgotten_with_it() -> None:
    stack = workers()
    first = send(stack, PROMPT)
    gone = next(worker.facts for worker in stack.workers() if worker.facts.name == first.names[0])
    stack.leave(gone.incarnation, "exited", 0)
    stack.register(replace(gone, incarnation=Incarnation(gone.incarnation + 1000)), 0)
    assert [worker.cached_tokens(hash_blocks(PROMPT)) > 0 for worker in stack.workers()].count(True) == 1


def test_what_decode_may_come_to_hold_makes_no_prefill_worker_overloaded() -> None:
    """A chat without a length may fill decode's cache, but takes few tokens of prefill's."""
    stack = workers()
    need = Need(len(PROMPT), 9_000, hash_blocks(PROMPT))
    first = stack.open_room("request", stack.place(need), need, 0)
    stack.side_retired(first.id, Side.PREFILL)
    second = stack.open_room("request", stack.place(need), need, 0)
    assert second.prefill == first.prefill
    assert second.decode.name != first.decode.name


def test_what_another_room_computes_is_not_forgotten_with_one_that_decode_computes_itself() -> None:
    stack = registry_of(facts(Side.PREFILL, 1), facts(Side.DECODE, 1))
    need = Need(200, 300, hash_blocks(range(200)))
    held = next(each for each in stack.workers() if each.facts.side is Side.PREFILL)
    rooms = [stack.open_room("request", stack.place(need), need, 0) for _ in range(3)]
    stack.mark_local(rooms[0].id)
    assert held.cached_tokens(need.blocks) == 192, "two others compute it"
    stack.end(rooms[1].id, LOST, 0)
    stack.side_retired(rooms[1].id, Side.PREFILL)
    stack.mark_local(rooms[2].id)
    assert held.cached_tokens(need.blocks) == 0, "of those one failed, and the other did not compute it"
    rooms = [stack.open_room("request", stack.place(need), need, 0) for _ in range(2)]
    stack.side_retired(rooms[0].id, Side.PREFILL)
    stack.mark_local(rooms[1].id)
    assert held.cached_tokens(need.blocks) == 192, "the first of them computed it"
    assert not held.sent_prefixes.awaited


def test_what_was_sent_is_asked_where_a_side_has_two_or_decode_computes() -> None:
    one = registry_of(facts(Side.PREFILL, 1), facts(Side.DECODE, 1))
    assert not one.uses_prefix_affinity
    one.register(facts(Side.DECODE, 2), 0)
    assert one.uses_prefix_affinity


# ---- what workers' logs say


def read_whole(stack: Registry, name: str, log: KvEventLog) -> None:
    """Let the registry read a worker's log from a snapshot."""
    incarnation = next(each.facts.incarnation for each in stack.workers() if each.facts.name == name)
    for part in log.snapshot():
        stack.read_kv_log(incarnation, part)


def log_of(*prompts: tuple[int, ...]) -> KvEventLog:
    """Return the log of a worker with these prompts cached, in blocks of one hash block."""
    log, page = KvEventLog(BLOCK_TOKENS), 0
    for prompt in prompts:
        parent = -1
        for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            log.stored(parent, PageId(page), prompt, start)
            parent, page = page, page + 1
    return log


def test_log_is_tree_a_new_router_places_by_what_is_cached() -> None:
    stack = workers()
    read_whole(stack, "prefill-2", log_of(PROMPT))
    read_whole(stack, "decode-2", log_of(PROMPT[: 3 * BLOCK_TOKENS]))
    sent = send(stack, PROMPT)
    assert sent.names == ("prefill-2", "decode-2")
    [entry] = stack.open_rooms()
    assert entry.prompt_tokens == 400 - 320


def test_log_is_tree_what_is_on_its_way_counts_with_what_is_logged() -> None:
    stack = workers()
    log = log_of(PROMPT[: 2 * BLOCK_TOKENS])
    read_whole(stack, "prefill-1", log)
    first = send(stack, PROMPT)
    assert first.names[0] == "prefill-1"
    prefill = next(each for each in stack.workers() if each.facts.name == "prefill-1")
    assert prefill.cached_tokens(hash_blocks(PROMPT)) == 5 * BLOCK_TOKENS
    assert len(prefill.sent_prefixes) == 3, "the log has the others"
    before = log.number
    log.stored(PageId(1), PageId(2), PROMPT, 2 * BLOCK_TOKENS)
    log.hidden(PageId(2))
    events = log.after(before)
    assert events is not None
    assert len(events.events) == 2
    assert stack.read_kv_log(prefill.facts.incarnation, events)
    assert prefill.cached_tokens(hash_blocks(PROMPT)) == 2 * BLOCK_TOKENS, "it was computed, and evicted"
    assert prefill not in stack.sides[Side.PREFILL].holders_of(hash_blocks(PROMPT)[2:3])


def test_log_is_tree_a_worker_leaves_with_all_that_it_logged_and_was_sent() -> None:
    stack = workers()
    read_whole(stack, "prefill-1", log_of(PROMPT))
    send(stack, OTHER)
    for each in list(stack.workers()):
        stack.leave(each.facts.incarnation, "left", 0)
    assert not any(side.holders_of(hash_blocks(PROMPT)) for side in stack.sides.values())
    assert not stack.read_kv_log(Incarnation(1), log_of(PROMPT).snapshot()[0]), "it is gone"
