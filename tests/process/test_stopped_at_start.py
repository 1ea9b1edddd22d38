"""SIGTERM while a service comes up: does it end at once, with exit code 0, whatever it waits for?"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.stack import READY_S, free_port

SOON_S = 10.0
"""Loading takes far longer here, and so does the drain time."""

LOADS = """
import sys, time
from importlib import import_module
from services.bootstrap.settings import BootstrapSettings
from services.decode.settings import DecodeSettings
from services.prefill.settings import PrefillSettings
from services.runtime import logging
from services.runtime.settings import load

def loads(*_):
    print("loading", flush=True)
    time.sleep(600)

role = sys.argv[1]
logging.configure("info", "text")
wiring = import_module(f"services.{role}.wiring")
if role == "bootstrap":
    wiring._load = loads
    sys.exit(wiring.run(load(BootstrapSettings, {"http_port": "0", "grpc_port": "0"}, {})))
cls = {"prefill": PrefillSettings, "decode": DecodeSettings}[role]
sys.exit(wiring.run(load(cls, {}, {}), loads))
"""


@contextmanager
def coming_up(log: Path, words: str, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has said so."""
    with log.open("wb") as sink:
        process = subprocess.Popen([sys.executable, *command], stdout=sink, stderr=subprocess.STDOUT)
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
    with coming_up(log, "loading", ["-c", LOADS, role]) as process:
        process.send_signal(number)
        assert process.wait(SOON_S) == 0, log.read_text()
    assert "asked to stop before it was ready" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_rank_that_waits_for_its_group_ends_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["-m", "services.cli.main", "prefill", "--tp", "2", "--rank", "0"]
    command += ["--rendezvous", f"127.0.0.1:{free_port()}"]
    with coming_up(log, " listening ", command) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON_S) == 0, log.read_text()
