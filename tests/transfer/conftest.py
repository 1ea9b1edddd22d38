"""Every backend under the same tests."""

import logging
from collections.abc import Iterator

import pytest

from baton.ids import Incarnation
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.memory_transfer import MemoryTransfer
from baton.transfer.nixl import NixlTransfer
from baton.transfer.transfer_protocol import Transfer
from tests.transfer.bench import Bench, MakeTransfer


def over_memory() -> MakeTransfer:
    fabric = MemoryFabric()

    def make(incarnation: Incarnation, agent: str | None) -> Transfer:
        return MemoryTransfer(fabric, incarnation, agent)

    return make


def over_nixl() -> MakeTransfer:
    def make(incarnation: Incarnation, agent: str | None) -> Transfer:
        return NixlTransfer(incarnation, agent)

    return make


BACKENDS = {"memory": over_memory, "nixl": over_nixl}


@pytest.fixture(params=sorted(BACKENDS))
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(BACKENDS[request.param]())
    raise_exceptions = logging.raiseExceptions
    yield bench
    bench.close()
    assert logging.raiseExceptions == raise_exceptions
