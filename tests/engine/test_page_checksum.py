"""Tests that the checksum of pages is the defined one on any ranks, and detects differences."""

import ctypes
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton.engine.kv_cache import PagedKvCache
from baton.engine.torch_engine import TorchEngine
from baton.engine_interface import PageSum, PageSumRequest, Row, Sequence
from baton.inference import page_checksum
from baton.inference.collectives import alone
from baton.inference.page_checksum import PageSummer
from baton.pages.kv_checksum import WORD, nonzero_sum
from baton.pages.layout import DTYPE_BYTES, KvLayout
from baton.pages.rank_layout import rank_layout
from baton.pages.transfer_plan import plan_hand_over, windows
from baton.rooms.request import Request
from baton.topology import Topology
from tests.engine.conftest import MakeEngine
from tests.engine.page_sums import Memory, carry, reference
from tests.inference.engine_worker import GREEDY
from tests.layouts import changed, group_of, one_group

TOKENS = 40
WHOLE = one_group("model", "bfloat16", 16, (0, 1, 2, 3), (0, 1, 2), 8)

some = settings(max_examples=60, deadline=None)
ids = st.lists(st.integers(0, 50), unique=True, min_size=1, max_size=3).map(lambda each: tuple(sorted(each)))
layouts = st.builds(
    one_group,
    model=st.just("model"),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    page_tokens=st.integers(1, 5),
    layers=ids,
    heads=ids,
    head_dim=st.integers(1, 9),
)


@st.composite
def memories(draw: st.DrawFn) -> tuple[Memory, int, int]:
    """Memory, and positions [start, stop) of the sequence in it."""
    stop = draw(st.integers(1, 12))
    start = draw(st.integers(0, stop - 1))
    return Memory(draw(layouts), stop, draw(st.integers(0, 2**31))), start, stop


def total(memory: Memory, start: int, stop: int) -> int:
    return PageSummer(memory.cache).total(memory.table, start, stop)


@some
@given(memories())
def test_the_sum_is_the_one_that_is_defined(drawn: tuple[Memory, int, int]) -> None:
    memory, start, stop = drawn
    assert total(memory, start, stop) == reference(memory.vectors(start, stop))


@some
@given(memories(), st.data())
def test_every_single_flipped_bit_is_seen(drawn: tuple[Memory, int, int], data: st.DataObject) -> None:
    memory, start, stop = drawn
    before = total(memory, start, stop)
    vector = memory.vector(data.draw(st.sampled_from(list(memory.places(start, stop)))))
    vector[data.draw(st.integers(0, len(vector) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert total(memory, start, stop) != before


@some
@given(memories(), st.data())
def test_any_two_vectors_in_each_others_place_are_seen(
    drawn: tuple[Memory, int, int], data: st.DataObject
) -> None:
    memory, start, stop = drawn
    places = st.sampled_from(list(memory.places(start, stop)))
    one, other = (memory.vector(data.draw(places)) for _ in range(2))
    assume(not torch.equal(one, other))
    before = total(memory, start, stop)
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
    assert total(memory, start, stop) != before


@some
@given(memories(), st.data())
def test_numbers_in_another_order_within_a_vector_are_seen(
    drawn: tuple[Memory, int, int], data: st.DataObject
) -> None:
    memory, start, stop = drawn
    vector = memory.vector(data.draw(st.sampled_from(list(memory.places(start, stop)))))
    before = total(memory, start, stop)
    turned = vector.roll(DTYPE_BYTES[memory.group.dtype])
    assume(not torch.equal(turned, vector))
    vector.copy_(turned)
    assert total(memory, start, stop) != before


@some
@given(memories(), st.integers(0, 12), st.integers(0, 2**31))
def test_chunks_add_up_and_what_lies_elsewhere_does_not_count(
    drawn: tuple[Memory, int, int], cut: int, seed: int
) -> None:
    memory, start, stop = drawn
    middle = min(max(cut, start), stop)
    whole = total(memory, start, stop)
    assert (total(memory, start, middle) + total(memory, middle, stop)) & WORD == whole
    spoilt = Memory(memory.layout, stop, seed)
    carry([memory], [spoilt], start, stop)
    assert total(spoilt, start, stop) == whole


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_zeros_count_and_signs_too(dtype: str) -> None:
    memory = Memory(changed(WHOLE, dtype=dtype), TOKENS)
    memory.raw.zero_()
    sums = [total(memory, 0, stop) for stop in range(TOKENS + 1)]
    assert sums[0] == 0
    assert len(set(sums)) == TOKENS + 1, "one token more or less is seen, and none sums up to nothing"
    memory.cache.tensor.neg_()
    assert total(memory, 0, TOKENS) != sums[-1], "every zero turned into a negative zero"


# ---- whoever holds which part


def ranks(layout: KvLayout, *parts: dict[str, tuple[int, ...]]) -> list[KvLayout]:
    return [changed(layout, **part) for part in parts]


ONE = [WHOLE]
TP3 = ranks(WHOLE, {"heads": (0,)}, {"heads": (1,)}, {"heads": (2,)})
PP2 = ranks(WHOLE, {"layers": (0, 1)}, {"layers": (2, 3)})
LARGE = [changed(WHOLE, page_tokens=32)]
SMALL = [changed(each, page_tokens=7) for each in TP3]


@pytest.mark.parametrize("start", [0, 16])
@pytest.mark.parametrize(
    ("senders", "receivers"),
    [(ONE, TP3), (TP3, ONE), (PP2, ONE), (ONE, PP2), (ONE, LARGE), (LARGE, ONE), (PP2, SMALL)],
    ids=["tp1-3", "tp3-1", "pp2-1", "pp1-2", "page16-32", "page32-16", "pp2-tp3-page7"],
)
def test_both_sides_of_differing_layouts_sum_up_to_the_same(
    senders: list[KvLayout], receivers: list[KvLayout], start: int
) -> None:
    sources = [Memory(layout, TOKENS, seed) for seed, layout in enumerate(senders)]
    targets = [Memory(layout, TOKENS, 100 + seed) for seed, layout in enumerate(receivers)]
    carry(sources, targets, start, TOKENS)
    sent, landed = (sum(total(each, start, TOKENS) for each in side) & WORD for side in (sources, targets))
    assert sent == landed
    targets[-1].vector(next(iter(targets[-1].places(start, TOKENS))))[0] ^= 1
    assert sum(total(each, start, TOKENS) for each in targets) & WORD != sent


@pytest.mark.parametrize("swapped", ["pages", "heads", "layers", "halves", "tokens"])
def test_a_transfer_to_the_wrong_place_is_seen(swapped: str) -> None:
    source, target = Memory(WHOLE, TOKENS, 1), Memory(WHOLE, TOKENS, 2)
    carry([source], [target], 0, TOKENS)
    pages = target.raw
    if swapped == "pages":
        target.table[0], target.table[1] = target.table[1], target.table[0]
    else:
        axis = {"heads": 1, "layers": 2, "halves": 3, "tokens": 4}[swapped]
        one, other = pages.select(axis, 0), pages.select(axis, 1)
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
    assert total(target, 0, TOKENS) != total(source, 0, TOKENS)


@pytest.mark.parametrize("window_bytes", [700, 4096])
@pytest.mark.parametrize(
    ("senders", "receivers", "page_tokens"),
    [
        (Topology(), Topology(), 16),
        (Topology(), Topology(tensor=3), 16),
        (Topology(tensor=3), Topology(), 16),
        (Topology(pipeline=3), Topology(), 16),
        (Topology(pipeline=2), Topology(tensor=3), 8),
        (Topology(tensor=3, pipeline=2), Topology(), 48),
    ],
    ids=str,
)
def test_what_the_plan_carries_sums_up_to_the_same_and_each_missing_window_is_seen(
    senders: Topology, receivers: Topology, page_tokens: int, window_bytes: int
) -> None:
    theirs = changed(WHOLE, page_tokens=page_tokens)
    sources = [Memory(rank_layout(WHOLE, senders, rank), 48, rank) for rank in range(senders.ranks)]
    targets = [Memory(rank_layout(theirs, receivers, rank), 48, rank + 9) for rank in range(receivers.ranks)]
    plan = plan_hand_over([each.layout for each in sources], [each.layout for each in targets])
    cuts = [
        (target, source, window)
        for (sender, source), (receiver, target) in product(enumerate(sources), enumerate(targets))
        for _, window in windows(
            plan.between(sender, receiver).groups[0].runs(source.table, target.table, 0, 0, 48), window_bytes
        )
    ]
    before = [target.raw.clone() for target in targets]
    want = sum(total(source, 0, 48) for source in sources) & WORD
    for missing in (None, *range(len(cuts))):
        for memory, was in zip(targets, before, strict=True):
            memory.raw.copy_(was)
        for target, source, window in (cut for index, cut in enumerate(cuts) if index != missing):
            for at, to, length in window:
                ctypes.memmove(target.cache.address + to, source.cache.address + at, length)
        got = sum(total(target, 0, 48) for target in targets) & WORD
        assert (got == want) == (missing is None)


# ---- how it is computed


def test_memory_that_was_moved_sums_up_to_the_same() -> None:
    memory = Memory(WHOLE, TOKENS)
    summer, before = PageSummer(memory.cache), total(memory, 0, TOKENS)
    old = memory.cache.tensor
    memory.cache.move()
    assert summer.total(memory.table, 0, TOKENS) == before
    old.zero_()
    assert summer.total(memory.table, 0, TOKENS) == before, "what lies at the old address does not count"


@pytest.mark.parametrize("at_a_time", [1, 500, 5_000, 2**30])
def test_any_bound_on_what_is_read_at_a_time_gives_the_same(
    at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(WHOLE, TOKENS)
    want = total(memory, 3, TOKENS)
    monkeypatch.setattr(page_checksum, "BYTES_AT_A_TIME", at_a_time)
    summer = PageSummer(memory.cache)
    layer_bytes = group_of(WHOLE).page_bytes // len(WHOLE.layers)
    for _, pages, layers in summer.pieces(memory.table, 3, TOKENS):
        taken = len(range(*layers.indices(len(WHOLE.layers))))
        assert len(pages) * taken * layer_bytes <= max(at_a_time, layer_bytes)
    assert summer.total(memory.table, 3, TOKENS) == want


@pytest.fixture
def engine(tiny_engine: MakeEngine) -> TorchEngine:
    return tiny_engine("llama-gqa-untied")


@pytest.mark.parametrize("start", [0, 16])
@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_a_step_carries_the_sum_on_over_what_it_computed(engine: TorchEngine, chunk: int, start: int) -> None:
    """The sum grows chunk by chunk, beside a row without a sum. The receiver's way to sum gives the same."""
    summed, beside = (Sequence(Request("r", (5, *range(39)), 8, sampling=GREEDY), []) for _ in range(2))
    pages, other = [7, 2, 9], [4, 5, 6]
    summed.page_sum = PageSum(start)
    for at in range(0, 40, chunk):
        stop = min(at + chunk, 40)
        rows = [
            Row(each, at, stop, (table,), stop == 40) for each, table in ((beside, other), (summed, pages))
        ]
        engine.step(rows)
    assert summed.page_sum.stop == 40
    assert beside.page_sum is None
    landed = PageSum(start)
    for stop in (20, 40):
        engine.sum_pages([PageSumRequest(landed, (pages,), stop, ends=stop == 40)])
    assert nonzero_sum(landed.total) == nonzero_sum(summed.page_sum.total)
    engine.cache.tensor[9, 1, 0, 0, 7] += 1.0
    spoilt = PageSum(start)
    engine.sum_pages([PageSumRequest(spoilt, (pages,), 40, ends=True)])
    assert nonzero_sum(spoilt.total) != nonzero_sum(summed.page_sum.total)


def test_a_sum_that_starts_behind_the_prompt_adds_nothing(engine: TorchEngine) -> None:
    """The receiver had the whole prompt cached before (`zero-page-hand-over`)."""
    whole = PageSum(16)
    engine.sum_pages([PageSumRequest(whole, ([3],), 16, ends=True)])
    assert (whole.stop, whole.total) == (16, 0)


# ---- encoded pages


ENCODED = changed(WHOLE, encoding="amx")


@some
@given(st.integers(0, 2**31), st.data())
def test_an_encoded_page_is_summed_whole_and_every_flipped_bit_is_seen(
    seed: int, data: st.DataObject
) -> None:
    """A bit behind the last position counts, too, since the layout within an encoded page is unknown here."""
    memory = Memory(ENCODED, TOKENS, seed)
    before = total(memory, 16, TOKENS)
    assert before == total(memory, 16, 20) + total(memory, 20, TOKENS) & WORD
    pages = memory.raw[memory.table[1:]].flatten()
    place = data.draw(st.integers(0, pages.numel() - 1))
    page, at = divmod(place, pages.numel() // 2)
    memory.raw[memory.table[1 + page]].view(-1)[at] ^= 1 << data.draw(st.integers(0, 7))
    assert total(memory, 16, TOKENS) != before


@some
@given(st.integers(0, 2**31))
def test_encoded_pages_in_each_others_place_are_seen(seed: int) -> None:
    memory = Memory(ENCODED, TOKENS, seed)
    before = total(memory, 0, TOKENS)
    memory.table[0], memory.table[1] = memory.table[1], memory.table[0]
    assert total(memory, 0, TOKENS) != before


@pytest.mark.parametrize("topology", [Topology(3), Topology(1, 2), Topology(3, 4)], ids=str)
def test_encoded_pages_sum_up_to_the_same_on_any_ranks(topology: Topology) -> None:
    whole = Memory(ENCODED, TOKENS)
    ranks = [Memory(rank_layout(ENCODED, topology, rank), TOKENS) for rank in range(topology.ranks)]
    for rank in ranks:
        carry([whole], [rank], 0, 48)
    assert sum(total(rank, 0, TOKENS) for rank in ranks) & WORD == total(whole, 0, TOKENS)


@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_a_step_sums_no_encoded_page_that_later_rows_write_to(engine: TorchEngine, chunk: int) -> None:
    cache = PagedKvCache(replace(engine.cache.group, encoding="amx"), 12, torch.device("cpu"))
    runner = engine.execution.runner([cache])
    encoded = TorchEngine(engine.model, engine.whole, [cache], alone(), engine.execution, runner)
    sequence = Sequence(Request("r", (5, *range(39)), 8, sampling=GREEDY), [])
    sequence.page_sum, pages = PageSum(0), [7, 2, 9]
    for at in range(0, 40, chunk):
        stop = min(at + chunk, 40)
        encoded.step([Row(sequence, at, stop, (pages,), stop == 40)])
    landed = PageSum(0)
    for stop in (20, 40):
        encoded.sum_pages([PageSumRequest(landed, (pages,), stop, ends=stop == 40)])
    assert nonzero_sum(landed.total) == nonzero_sum(sequence.page_sum.total)
    assert sequence.page_sum.stop == 40
