"""Tests that GPUs are found without the tensor library, and none is shared while another is idle."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.launch.gpus import VISIBLE, count_gpus, deal_gpus, find_gpus


@given(st.integers(0, 9), st.lists(st.integers(1, 8), max_size=6))
def test_every_worker_has_a_gpu_for_each_rank_and_none_is_shared_while_another_is_idle(
    there: int, ranks: list[int]
) -> None:
    gpus = tuple(map(str, range(there)))
    shares = deal_gpus(gpus, ranks)
    assert [len(share) for share in shares] == [min(wanted, there) for wanted in ranks]
    assert all(len(set(share)) == len(share) for share in shares)
    given_to = [sum(gpu in share for share in shares) for gpu in gpus]
    if sum(ranks) <= there:
        assert max(given_to, default=0) <= 1
    elif gpus:
        assert min(given_to) >= 1


@pytest.mark.parametrize(
    ("shown", "found"),
    [("2,3", ("2", "3")), (" 1 , GPU-8f,1", ("1", "GPU-8f")), ("", ()), ("0,-1,1", ("0",)), ("-1", ())],
)
def test_gpus_that_are_named_already_are_the_ones_there_are(shown: str, found: tuple[str, ...]) -> None:
    assert find_gpus({VISIBLE: shown}, lambda: 8) == found


def test_without_a_word_all_gpus_of_the_machine_are_there() -> None:
    assert find_gpus({}, lambda: 3) == ("0", "1", "2")


def _says(folder: Path, text: str, code: int = 0) -> str:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\nexit {code}\n")
    program.chmod(0o755)
    return str(program)


def test_gpus_are_counted_by_the_drivers_own_program_not_their_parts(tmp_path: Path) -> None:
    told = (
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-8f)\n"
        "  MIG 1g.10gb Device 0: (UUID: MIG-1)\n"
        "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-9a)"
    )
    assert count_gpus(_says(tmp_path, told), tmp_path / "none") == 2


def test_where_that_program_fails_or_is_missing_the_drivers_directory_is_counted(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert count_gpus(_says(tmp_path, "no devices", 9), tmp_path / "gpus") == 3
    assert count_gpus(str(tmp_path / "missing"), tmp_path / "gpus") == 3
    assert count_gpus(str(tmp_path / "missing"), tmp_path / "none") == 0
