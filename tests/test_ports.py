"""Tests that a free port given to a test is given to no other."""

import pytest

from baton.runtime.listening_ports import port_of, reserve_port
from tests import ports
from tests.ports import HOST, free_neighbours


def test_a_port_that_is_held_is_nobodys_neighbour_though_one_could_listen_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free_port = ports.free_port
    with reserve_port(HOST) as held:
        beside = iter((port_of(held) - 1,))
        monkeypatch.setattr(ports, "free_port", lambda: next(beside, None) or free_port())
        first = free_neighbours(2)
        assert port_of(held) not in (first, first + 1)
