"""Do plans and windows carry exactly the bytes that they should, to where they should?"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.pages.errors import LayoutMismatch, Truncated
from services.pages.layout import KvLayout
from services.pages.plan import PageRun, TransferPlan, plan_transfer, windows

PAGE = 24
POOL = 12
LAYOUT = KvLayout("model", "bfloat16", 16, (0, 1), (0, 1, 2), 64)

page_lists = st.lists(st.integers(0, POOL - 1), unique=True, max_size=POOL)
runs_lists = st.lists(
    st.builds(PageRun, source=st.integers(0, 500), target=st.integers(0, 500), length=st.integers(0, 60)),
    max_size=6,
)


def carried(runs: list[PageRun]) -> list[tuple[int, int]]:
    """(source byte, target byte), in order."""
    return [(run.source + i, run.target + i) for run in runs for i in range(run.length)]


@given(page_lists, page_lists)
def test_no_truncation_every_byte_of_every_page_goes_to_its_place(
    source: list[int], target: list[int]
) -> None:
    plan = TransferPlan(PAGE)
    if len(source) != len(target):
        with pytest.raises(Truncated, match=f"{len(source)} pages to send, {len(target)} pages to fill"):
            plan.runs(source, target)
        return
    expected = [
        (a * PAGE + i, b * PAGE + i) for a, b in zip(source, target, strict=True) for i in range(PAGE)
    ]
    assert carried(plan.runs(source, target)) == expected


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 6))
def test_neighbours_become_one_run(source: int, target: int, count: int) -> None:
    runs = TransferPlan(PAGE).runs(range(source, source + count), range(target, target + count))
    assert runs == [PageRun(source * PAGE, target * PAGE, count * PAGE)]


def test_runs_break_where_either_side_does() -> None:
    runs = TransferPlan(PAGE).runs([1, 2, 3, 7], [4, 5, 9, 10])
    assert [(run.source // PAGE, run.target // PAGE, run.length // PAGE) for run in runs] == [
        (1, 4, 2),
        (3, 9, 1),
        (7, 10, 1),
    ]


@given(runs_lists, st.integers(1, 70))
def test_windows_carry_exactly_the_runs_and_none_is_too_large(runs: list[PageRun], window_bytes: int) -> None:
    cut = list(windows(runs, window_bytes))
    assert carried([run for window in cut for run in window]) == carried(runs)
    sizes = [sum(run.length for run in window) for window in cut]
    assert all(size == window_bytes for size in sizes[:-1])
    assert all(0 < size <= window_bytes for size in sizes)
    assert all(run.length > 0 for window in cut for run in window)


@pytest.mark.parametrize("window_bytes", [0, -1])
def test_a_window_of_no_bytes_is_refused(window_bytes: int) -> None:
    with pytest.raises(ValueError, match="carries nothing"):
        list(windows([PageRun(0, 0, 1)], window_bytes))


def test_zero_pages_are_zero_runs() -> None:
    assert TransferPlan(PAGE).runs([], []) == []
    assert list(windows([], 10)) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "other"),
        ("dtype", "float32"),
        ("page_tokens", 32),
        ("layers", (0,)),
        ("kv_heads", (0, 1)),
        ("head_dim", 128),
    ],
)
def test_schema_agreed_a_mismatch_names_its_field(field: str, value: object) -> None:
    changes: dict[str, object] = {field: value}
    with pytest.raises(LayoutMismatch, match=f"{field} differs") as caught:
        plan_transfer(LAYOUT, replace(LAYOUT, **changes))  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["layers", "kv_heads"])
def test_layers_by_id_as_many_under_other_ids_do_not_map(field: str) -> None:
    changes: dict[str, Any] = {field: tuple(each + 1 for each in getattr(LAYOUT, field))}
    with pytest.raises(LayoutMismatch, match=f"{field} differs"):
        plan_transfer(LAYOUT, replace(LAYOUT, **changes))


def test_equal_layouts_map_page_by_page() -> None:
    assert plan_transfer(LAYOUT, LAYOUT) == TransferPlan(LAYOUT.page_bytes)


def test_the_layouts_arithmetic() -> None:
    """SmolLM2-135M in bf16: 30 layers x K and V x 3 heads x 64 x 2 bytes."""
    layout = KvLayout("smollm2", "bfloat16", 16, tuple(range(30)), (0, 1, 2), 64)
    assert layout.token_bytes == 23_040
    assert layout.page_bytes == 16 * 23_040


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_pages_hold_all_tokens_and_no_page_is_spare(tokens: int, page_tokens: int) -> None:
    pages = replace(LAYOUT, page_tokens=page_tokens).pages_for(tokens)
    assert pages * page_tokens >= tokens > (pages - 1) * page_tokens or (tokens, pages) == (0, 0)
