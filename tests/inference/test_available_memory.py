"""Tests of reading available memory, on a machine and in a container, and of waiting for it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch

from baton.inference import available_memory
from baton.inference.available_memory import LOOK_S, PATIENCE_S, Available, available, memory_shortage

CPU: Final = torch.device("cpu")
OF_MACHINE: Final = Available(3000 * 1024, 9000 * 1024, "on this machine")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 3000 kB available."""
    monkeypatch.setattr(available_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(available_memory, "CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 3000 kB\n")
    return tmp_path


def limit(system: Path, most: str, taken: int, stat: str = "anon 5\n") -> None:
    (system / "memory.max").write_text(f"{most}\n")
    (system / "memory.current").write_text(f"{taken}\n")
    (system / "memory.stat").write_text(stat)


def test_without_a_limit_the_machine_counts(system: Path) -> None:
    assert available(CPU) == OF_MACHINE
    limit(system, "max", 10)
    assert available(CPU) == OF_MACHINE


def test_a_containers_limit_counts_less_what_it_can_drop(system: Path) -> None:
    """File pages in use can be dropped as well, and a container that runs for long is full of them."""
    stat = "anon 50\nshmem 70\ninactive_file 100000\nactive_file 800000\nslab_reclaimable 40000\nslab 50000\n"
    limit(system, "1000000", 999_500, stat)
    assert available(CPU) == Available(940_500, 1_000_000, "under the container's limit of 1000000")


def test_the_smaller_counts(system: Path) -> None:
    limit(system, str(10**12), 0)
    assert available(CPU) == OF_MACHINE


def test_a_system_that_does_not_tell(system: Path) -> None:
    (system / "meminfo").unlink()
    assert available(CPU) is None
    assert memory_shortage(CPU, 2**60) is None


class Patience:
    """A clock that only sleeping moves, and events at its times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.then: Callable[[], None] = lambda: None
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.then()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Patience:
    return Patience(monkeypatch)


def test_what_suffices_is_not_waited_for(system: Path, patience: Patience) -> None:
    assert memory_shortage(CPU, OF_MACHINE.size) is None
    assert patience.now_s == 0


def test_what_an_ended_process_gives_back_is_waited_for(system: Path, patience: Patience) -> None:
    def given_back() -> None:
        if patience.now_s >= 3:
            (system / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")

    patience.then = given_back
    assert memory_shortage(CPU, 5000 * 1024) is None
    assert patience.now_s == 3


def test_what_stays_short_is_told_after_a_while(system: Path, patience: Patience) -> None:
    assert memory_shortage(CPU, OF_MACHINE.size + 1) == OF_MACHINE
    assert PATIENCE_S <= patience.now_s <= PATIENCE_S + LOOK_S


def test_more_than_there_is_in_all_is_told_at_once(system: Path, patience: Patience) -> None:
    assert memory_shortage(CPU, OF_MACHINE.total + 1) == OF_MACHINE
    assert patience.now_s == 0
