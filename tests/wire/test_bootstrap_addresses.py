"""Tests of the addresses of all bootstraps, of which a name may have several."""

import asyncio
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from baton.prefill.settings import PrefillSettings
from baton.runtime.errors import SettingsError
from baton.runtime.settings import load
from baton.wire.bootstrap_addresses import BootstrapAddresses
from tests.patience import PATIENCE_S


class Names:
    """A name server, whose answers the test sets."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.queries: list[tuple[str, int]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def lookup(self, host: str, port: int) -> Sequence[tuple[Any, ...]]:
        self.queries.append((host, port))
        assert self.may_answer.wait(PATIENCE_S)
        if not self.addresses:
            raise socket.gaierror("no such name")
        kinds = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in self.addresses]
        return [
            (kind, socket.SOCK_STREAM, 6, "", (each, port))
            for kind, each in zip(kinds, self.addresses, strict=True)
        ]


def test_the_flag_takes_several_addresses_by_commas() -> None:
    settings = load(PrefillSettings, {"bootstrap": "10.0.0.1:8100, b:8100,[::1]:8100"}, {})
    assert settings.bootstrap == ("10.0.0.1:8100", "b:8100", "[::1]:8100")
    assert load(PrefillSettings, {}, {}).bootstrap == ("127.0.0.1:8100",)


@pytest.mark.parametrize("given", ["", "a:1,", "a", "a:1,a:1", "a:0"])
def test_the_flag_takes_nothing_else(given: str) -> None:
    with pytest.raises(SettingsError, match="--bootstrap"):
        load(PrefillSettings, {"bootstrap": given}, {})


async def test_addresses_are_taken_as_they_are_and_not_looked_up() -> None:
    names = Names("10.0.0.9")
    addresses = BootstrapAddresses(("10.0.0.1:8100", "[::1]:8100"), names.lookup)
    assert not addresses.may_change
    assert await addresses.look_up() == ["10.0.0.1:8100", "[::1]:8100"]
    assert names.queries == []


@pytest.mark.parametrize("found", [("10.0.0.1",), ("::1", "127.0.0.1"), ()])
async def test_a_name_of_one_bootstrap_is_left_to_grpc(found: tuple[str, ...]) -> None:
    names = Names(*found)
    addresses = BootstrapAddresses(("bootstrap:8100",), names.lookup)
    assert addresses.may_change
    assert await addresses.look_up() == ["bootstrap:8100"]
    assert names.queries == [("bootstrap", 8100)]


async def test_a_name_of_several_is_all_of_them_and_follows_what_comes_and_goes() -> None:
    names = Names("10.0.0.2", "10.0.0.1")
    addresses = BootstrapAddresses(("bootstrap:8100", "10.1.0.1:8100"), names.lookup)
    assert await addresses.look_up() == ["10.0.0.1:8100", "10.0.0.2:8100", "10.1.0.1:8100"]
    names.addresses = ("10.0.0.2", "10.0.0.3")
    assert await addresses.look_up() == ["10.0.0.2:8100", "10.0.0.3:8100", "10.1.0.1:8100"]
    names.addresses = ()
    assert await addresses.look_up() == ["10.0.0.2:8100", "10.0.0.3:8100", "10.1.0.1:8100"], "no answer"
    names.addresses = ("10.0.0.3",)
    assert await addresses.look_up() == ["10.0.0.3:8100", "10.1.0.1:8100"], "it had several before"


async def test_addresses_of_two_families_are_those_of_one() -> None:
    names = Names("fd00::1", "10.0.0.1", "fd00::2", "10.0.0.2")
    addresses = BootstrapAddresses(("bootstrap:8100",), names.lookup)
    assert await addresses.look_up() == ["[fd00::1]:8100", "[fd00::2]:8100"]


async def test_a_name_server_that_is_silent_is_asked_once_and_holds_nothing_up() -> None:
    names = Names("10.0.0.1", "10.0.0.2")
    names.may_answer.clear()
    addresses = BootstrapAddresses(("bootstrap:8100",), names.lookup)
    for _ in range(3):
        assert await addresses.look_up(within_s=0.001) == ["bootstrap:8100"]
    assert len(names.queries) == 1
    names.may_answer.set()
    async with asyncio.timeout(PATIENCE_S):
        while await addresses.look_up() != ["10.0.0.1:8100", "10.0.0.2:8100"]:
            await asyncio.sleep(0.001)
