"""Names, addresses and texts of messages obey the rules of settings."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.runtime.setting_kinds import ADDRESS, NAME, SettingKind
from baton.wire.baton.v1 import rooms_pb2, workers_pb2
from baton.wire.census import census_from_wire
from baton.wire.conversions import cause_from_wire, check_peer
from baton.wire.event_messages import event_from_wire
from baton.wire.layout_messages import layout_to_wire
from baton.wire.malformed import Malformed
from baton.wire.registration import process_from_wire, worker_from_wire
from baton.wire.text_validation import (
    address_from_wire,
    label_from_wire,
    name_from_wire,
    request_id_from_wire,
    shown_from_wire,
)
from tests.layouts import one_group

ODD: Final = (
    "",
    "a b",
    "a\nb",
    "\x1b[31mred",
    "<script>",
    'a"b',
    "a/b",
    "\u202eabc",
    "é",
    "a\0",
    "x" * 129,
    "{a}",
)
"""Texts that are no valid names."""
NOT_ADDRESSES: Final = (
    *("", "a", "a:", ":1", "a:0", "a:65536", "a:1:2", "a b:1", "a\n:1", "\x1b[2J:1", "<b>:1", "a/b:1", "é:1"),
    *("unix:/tmp/x", "dns:///a:1", "x" * 256 + ":1", "a:١"),
)


def allowed(kind: SettingKind[str], text: str) -> bool:
    try:
        kind.parse(text)
    except ValueError:
        return False
    return True


def taken(read: object, text: str) -> bool:
    try:
        read(text, "field")  # type: ignore[operator]
    except Malformed:
        return False
    return True


@given(st.text(max_size=140) | st.from_regex(r"[A-Za-z0-9._:\[\]-]{1,20}(:\d{1,6})?", fullmatch=True))
def test_a_message_is_refused_exactly_what_a_setting_is_refused(text: str) -> None:
    assert taken(name_from_wire, text) == (text != "" and allowed(NAME, text))
    assert taken(address_from_wire, text) == (text != "" and allowed(ADDRESS, text))


def registration(name: str = "w", address: str = "a:1") -> workers_pb2.RegisterRequest:
    return workers_pb2.RegisterRequest(
        worker=rooms_pb2.Peer(name=name, incarnation=3, address=address),
        side=rooms_pb2.SIDE_PREFILL,
        layout=layout_to_wire(one_group("model", "float32", 4, (0,), (0,), 2)),
        schema="s",
        tokens_max=1,
        rooms_max=1,
    )


@pytest.mark.parametrize("name", ODD)
def test_an_odd_name_registers_no_worker_and_names_no_process(name: str) -> None:
    assert worker_from_wire(registration()).name == "w"
    with pytest.raises(Malformed, match="worker"):
        worker_from_wire(registration(name=name))
    with pytest.raises(Malformed, match="process"):
        process_from_wire(name)
    with pytest.raises(Malformed, match="decode"):
        check_peer(rooms_pb2.Peer(name=name, incarnation=3, address="a:1"), "decode")


@pytest.mark.parametrize("address", NOT_ADDRESSES)
def test_an_odd_address_is_connected_to_by_nobody(address: str) -> None:
    with pytest.raises(Malformed, match="worker"):
        worker_from_wire(registration(address=address))


@pytest.mark.parametrize("field", ["schema", "model", "quantize", "plane"])
def test_a_label_that_is_compared_is_short_and_printable(field: str) -> None:
    for odd in ("\x1b[2J", "x" * 129, "é", "a\nb"):
        message = registration()
        match field:
            case "schema":
                message.schema = odd
            case "plane":
                message.layout.groups[0].planes[0].name = odd
            case _:
                setattr(message.layout, field, odd)
        with pytest.raises(Malformed, match="printable ASCII"):
            worker_from_wire(message)
    assert label_from_wire("float32 (2)", "label") == "float32 (2)"


def test_a_request_id_has_the_characters_of_an_x_request_id() -> None:
    assert request_id_from_wire("") == ""
    assert request_id_from_wire("a-1._:/+=@" + "x" * 246) != ""
    for odd in ("a b", "a\n", "\x1b", "é", "x" * 257):
        with pytest.raises(Malformed, match="request_id"):
            request_id_from_wire(odd)


@given(st.text(max_size=40), st.integers(0, 30))
def test_a_text_for_people_has_one_line_and_no_control_characters(text: str, most: int) -> None:
    shown = shown_from_wire(text, most)
    assert shown.isprintable()
    assert len(shown) == min(len(text), most)
    if text.isprintable():
        assert shown == text[:most]


def test_no_text_of_a_worker_reaches_a_terminal_with_escapes() -> None:
    odd = "\x1b[2Jgone\nline"
    line = rooms_pb2.RoomEvent(name=odd, detail=odd).SerializeToString()
    event = event_from_wire(line, "w")
    cause = cause_from_wire(rooms_pb2.Cause(reason="cancelled", text=odd))
    census = census_from_wire(workers_pb2.WorkerCensus(queues={odd: 1}))
    shown = (event.name, event.detail, cause.text, *census["queues"])
    assert set(shown) == {"\ufffd[2Jgone line"}
