"""Tests of SIGTERM during start-up: the service ends at once with exit code 0."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from baton.bootstrap.settings import BootstrapSettings
from baton.decode.settings import DecodeSettings
from baton.prefill.settings import PrefillSettings
from baton.runtime import logging
from baton.runtime.settings import load
from tests.forks import Process, clean_environ, fork_baton, fork_call
from tests.ports import free_port
from tests.preloaded import BOOTSTRAP, WORKERS
from tests.process.stack import READY_S

SOON_S = 10.0
"""Time in which a stopped process has to end, seconds. Loading and the drain time take far longer."""


def _loads(*_: object) -> None:
    print("loading", flush=True)  # noqa: T201
    time.sleep(600)


def _come_up(role: str) -> None:
    """Start the service with a model that loads slowly."""
    logging.configure("info", "text")
    wiring = import_module(f"baton.{role}.wiring")
    if role == BOOTSTRAP:
        wiring._load = _loads  # type: ignore[attr-defined]
        sys.exit(wiring.run(load(BootstrapSettings, {"http_port": "0", "grpc_port": "0"}, {})))
    cls = {"prefill": PrefillSettings, "decode": DecodeSettings}[role]
    sys.exit(wiring.run(load(cls, {}, {}), _loads))


@contextmanager
def coming_up(process: Process, log: Path, words: str) -> Iterator[Process]:
    """Yield the process once its log has `words`, and kill it afterwards."""
    try:
        ends = time.monotonic() + READY_S
        while words not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < ends, log.read_text()
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("role", ["bootstrap", "prefill", "decode"])
def test_a_service_that_loads_its_model_ends_at_once(
    role: str, number: signal.Signals, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    of = BOOTSTRAP if role == BOOTSTRAP else WORKERS
    with coming_up(fork_call(_come_up, (role,), log, of=of), log, "loading") as process:
        process.send_signal(number)
        assert process.wait(SOON_S) == 0, log.read_text()
    assert "asked to stop before it was ready" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_rank_that_waits_for_its_group_ends_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = ("prefill", "--tp", "2", "--rank", "0", "--rendezvous", f"127.0.0.1:{free_port()}")
    with log.open("wb") as sink:
        rank = fork_baton(words, clean_environ(), sink.fileno())
    with coming_up(rank, log, " listening ") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON_S) == 0, log.read_text()
