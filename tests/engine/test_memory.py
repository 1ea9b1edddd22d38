"""Is the memory that can still be taken read right, on a machine and in a container?"""

from pathlib import Path

import pytest
import torch

from services.engine import memory
from services.engine.memory import available_bytes


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 3000 kB available."""
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 3000 kB\n")
    return tmp_path


def limit(system: Path, most: str, taken: int, droppable: int) -> None:
    (system / "memory.max").write_text(f"{most}\n")
    (system / "memory.current").write_text(f"{taken}\n")
    (system / "memory.stat").write_text(f"anon 5\ninactive_file {droppable}\nactive_file 7\n")


def test_without_a_limit_the_machine_counts(system: Path) -> None:
    assert available_bytes(torch.device("cpu")) == 3000 * 1024
    limit(system, "max", 10, 0)
    assert available_bytes(torch.device("cpu")) == 3000 * 1024


def test_a_containers_limit_counts_less_what_it_can_drop(system: Path) -> None:
    limit(system, "1000000", 400_000, 100_000)
    assert available_bytes(torch.device("cpu")) == 700_000


def test_the_smaller_counts(system: Path) -> None:
    limit(system, str(10**12), 0, 0)
    assert available_bytes(torch.device("cpu")) == 3000 * 1024


def test_a_system_that_does_not_tell(system: Path) -> None:
    (system / "meminfo").unlink()
    assert available_bytes(torch.device("cpu")) is None
