"""Tests of reading a caller's trace context, which is ignored if it is invalid."""

import pytest

from baton.rooms.trace import STATE_CHARS_MAX, read_trace

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_context_names_its_trace_and_is_passed_on_as_it_came() -> None:
    parent = f"00-{TRACE}-{SPAN}-01"
    trace = read_trace(parent, "vendor=1,other=2")
    assert trace is not None
    assert (trace.trace_id, trace.parent, trace.state) == (TRACE, parent, "vendor=1,other=2")


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    trace = read_trace(f"01-{TRACE}-{SPAN}-01-more", "")
    assert trace is not None
    assert trace.parent == f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "parent",
    [
        None,
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"01-{TRACE}-{SPAN}-01more",
        f"00-{TRACE}-{SPAN}-0",
        f" 00-{TRACE}-{SPAN}-01",
    ],
)
def test_what_makes_no_sense_is_as_good_as_nothing(parent: str | None) -> None:
    assert read_trace(parent, "vendor=1") is None


@pytest.mark.parametrize("state", ["x" * (STATE_CHARS_MAX + 1), "a=\n", "ä=1"])
def test_a_state_that_could_not_be_passed_on_is_left_out(state: str) -> None:
    trace = read_trace(f"00-{TRACE}-{SPAN}-01", state)
    assert trace is not None
    assert trace.state == ""
