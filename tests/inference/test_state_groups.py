"""Tests of steps and memory of models whose layers have states."""

from dataclasses import replace

import pytest

from baton.engine_interface import Row, Sequence
from baton.inference.kv_memory import NotEnoughMemory, divide_memory
from baton.inference.row_check import check_row
from baton.rooms.request import Request
from tests.pages.test_states import CONTEXT, FULL, LAYOUT, STATES


def test_a_row_of_a_model_with_states_takes_no_drafts_and_has_one_state() -> None:
    sequence = Sequence(Request("r", (1, 2, 3), 4), [])
    row = Row(sequence, 0, 3, ((0,), (1,)), sample=True)
    check_row(row, LAYOUT.groups, (1, 2), CONTEXT)
    for wrong, text in (
        (replace(row, drafts=(4,)), "1 drafts of a model with states"),
        (replace(row, tables=((0,), ())), "3 tokens need 1 pages, the table has 0"),
        (replace(row, tables=((0,), (2,))), "page 2 of a cache of 2 pages"),
    ):
        with pytest.raises(ValueError, match=text):
            check_row(wrong, LAYOUT.groups, (1, 2), CONTEXT)


def test_memory_is_divided_so_that_groups_run_out_together() -> None:
    sequence = 16 // 4 * FULL.page_bytes + STATES.page_bytes
    assert divide_memory(LAYOUT.groups, 10 * sequence + 1, 1, 16) == (40, 10)
    assert divide_memory(LAYOUT.groups, 10 * sequence, 1, 2 * CONTEXT)[1] < 10, "longer ones, fewer states"
    assert divide_memory([FULL], 7 * FULL.page_bytes) == (7,)
    with pytest.raises(
        NotEnoughMemory, match="holds 0 pages of full KV, 0 pages of state KV for sequences of"
    ):
        divide_memory(LAYOUT.groups, 10)
    without_layers = replace(STATES, layers=())
    assert divide_memory([FULL, without_layers], 32 * FULL.page_bytes, 1, 16) == (32, 8)
