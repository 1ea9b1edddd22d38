"""Is it said, at the start, that something is open to others?"""

import logging

import pytest

from services.bootstrap.doors import open_doors
from services.bootstrap.settings import BootstrapSettings
from services.decode.settings import DecodeSettings
from services.rooms.ids import Incarnation
from services.runtime.exposed import beyond_this_machine
from services.runtime.settings import load
from services.wire.credential import draw
from services.wire.worker_host import WorkerHost

KEYS = {"BATON_API_KEYS": "sk-one-0123456789"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_the_loopback_is_this_machines(host: str) -> None:
    assert not beyond_this_machine(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "fe80::1%eth0", "node-7.example"])
def test_everything_else_may_be_reached_from_elsewhere(host: str) -> None:
    assert beyond_this_machine(host)


@pytest.mark.parametrize(
    ("flags", "environ", "told"),
    [
        ({}, {}, []),
        ({"admin_port": "0"}, {}, []),
        ({"host": "0.0.0.0"}, {}, ["no API keys are set", "plain HTTP", "gRPC is plain"]),
        ({"host": "0.0.0.0"}, KEYS, ["plain HTTP", "gRPC is plain"]),
        ({"host": "0.0.0.0", "grpc_host": "127.0.0.1"}, KEYS, ["plain HTTP"]),
        ({"grpc_host": "0.0.0.0"}, {}, ["gRPC is plain"]),
        ({"admin_port": "0", "admin_host": "0.0.0.0"}, {}, ["the pages for operators are open"]),
    ],
)
def test_the_bootstrap_warns_of_what_others_can_reach(
    flags: dict[str, str], environ: dict[str, str], told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    doors = open_doors(load(BootstrapSettings, {"http_port": "0", **flags}, environ))
    doors.close()
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warned) == len(told)
    assert all(words in text for words, text in zip(told, warned, strict=True))


async def test_a_worker_that_registers_where_its_peers_cannot_reach_it_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for bootstrap in ("10.0.0.1:8100", "127.0.0.1:8100"):
        worker = WorkerHost(load(DecodeSettings, {"bootstrap": bootstrap}, {}), Incarnation(7), draw())
        await worker.close()
    (warned,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warned.startswith("nobody on another machine reaches this worker: set --host or --advertise")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_worker_warns_of_a_plain_port_that_others_can_reach(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = load(DecodeSettings, {"host": host, "advertise": "127.0.0.1"}, {})
    worker = WorkerHost(settings, Incarnation(7), draw())
    await worker.close()
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [text.partition(":")[0] for text in warned] == (
        [] if host == "127.0.0.1" else ["gRPC is plain and open to whoever reaches it"]
    )
