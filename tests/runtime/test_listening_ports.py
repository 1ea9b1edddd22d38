"""Tests of ports that several processes of one user share."""

import pytest

from baton.runtime.errors import StartupError
from baton.runtime.listening_ports import bind_port, port_of

HOST = "127.0.0.1"


def test_a_port_is_shared_among_those_that_say_so() -> None:
    with (
        bind_port(HOST, 0, "--port", is_shared=True) as first,
        bind_port(HOST, port_of(first), "--port", is_shared=True) as second,
    ):
        assert port_of(second) == port_of(first)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_port_is_shared_with_nobody_who_does_not_say_so(is_shared: bool) -> None:
    with (
        bind_port(HOST, 0, "--port", is_shared=is_shared) as first,
        pytest.raises(StartupError, match="--port"),
    ):
        bind_port(HOST, port_of(first), "--port", is_shared=not is_shared)
