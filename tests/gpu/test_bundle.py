"""Tests of the bundle's contents, without a network."""

import base64
import csv
import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.gpu.bundle import (
    MACHINES,
    PYTHONS,
    ROOT,
    RUN,
    TESTING,
    THERE,
    closure,
    environment,
    name_of,
    needs,
    packages,
    slim,
)
from tests.gpu.checks import FILES

RUN_SH = ROOT / "tests" / "gpu" / RUN


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_with_torch_and_transformers_it_is_all_that_baton_and_its_tests_need(
    python: str, machine: str
) -> None:
    about = environment(python, machine)
    held = packages(python, machine, "13").keys()
    assert {"nixl", "nixl-cu13", "grpcio", "protobuf", "fastapi", "uvicorn", "uvloop"} <= held
    needed = closure([*THERE, *held], about, set())
    project = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]")[0]
    asked = {name_of(line.strip().strip('",')) for line in project.split("\n") if line.strip()}
    assert asked | set(TESTING) <= needed


def test_it_brings_nothing_of_which_torch_or_transformers_want_a_version_of_their_own() -> None:
    about = environment("3.12", "x86_64")
    held = packages("3.12", "x86_64", "13").keys()
    theirs = {*THERE, *needs("torch", about), *needs("transformers", about)}
    assert {"numpy", "huggingface-hub", "tokenizers"} <= theirs
    assert not held & theirs
    assert not [name for name in held if name.startswith(("nvidia-", "cuda-", "triton"))]


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_it_has_nixl_for_one_cuda(cuda: str) -> None:
    held = packages("3.12", "x86_64", cuda).keys()
    assert [name for name in held if name.startswith("nixl-cu")] == [f"nixl-cu{cuda}"]


def test_every_package_is_one_of_the_listed_files() -> None:
    for name, pin in packages("3.12", "x86_64", "13").items():
        first, *hashes = pin.split("\n")
        assert name_of(first.removesuffix(" \\")) == name
        assert "==" in first
        assert hashes
        assert all(line.strip().startswith("--hash=sha256:") for line in hashes)


def test_nixls_wheel_loses_what_is_another_library_and_lists_what_it_has(tmp_path: Path) -> None:
    kept = {"nixl_cu13/_api.py": b"a = 1\n", "nixl_cu13.libs/ucx/libuct_cuda.so.0.0.0": b"\x7fELF"}
    left_out = {
        "nixl_ep_cu13/buffer.py": b"large",
        "nixl_cu13.libs/ucx/libucx_perftest_cuda.so.0.0.0": b"tool",
        "nixl_cu13-1.5.1.data/headers/asio/read.hpp": b"header",
    }
    about = {"nixl_cu13-1.5.1.dist-info/METADATA": b"Name: nixl-cu13\n"}
    record = "nixl_cu13-1.5.1.dist-info/RECORD"
    wheel = tmp_path / "nixl_cu13-1.5.1-cp312-cp312-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as whole:
        for name, contents in {**kept, **left_out, **about}.items():
            whole.writestr(name, contents)
        whole.writestr(record, "nixl_ep_cu13/buffer.py,sha256=x,5\n")
    (tmp_path / "less").mkdir()
    with zipfile.ZipFile(slim(wheel, tmp_path / "less")) as less:
        assert less.testzip() is None
        assert set(less.namelist()) == {*kept, *about, record}
        rows = list(csv.reader(less.read(record).decode().splitlines()))
        assert rows[-1] == [record, "", ""]
        for name, told, size in rows[:-1]:
            contents = less.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(contents).digest()).rstrip(b"=").decode()
            assert (told, int(size)) == (f"sha256={digest}", len(contents))
        assert {row[0] for row in rows} == set(less.namelist())


def test_where_there_is_no_torch_the_script_says_so_and_installs_nothing(tmp_path: Path) -> None:
    script = tmp_path / RUN
    script.write_text(RUN_SH.read_text())
    ran = subprocess.run(
        ["sh", str(script)], env={"PATH": "/usr/bin:/bin", "PYTHON": "false"}, capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert "false has no torch and transformers" in ran.stderr
    assert list(tmp_path.iterdir()) == [script]


def test_the_kit_runs_every_test_that_needs_a_gpu() -> None:
    mark = "mark" + ".gpu"
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if mark in file.read_text() and file.parent.name != "gpu"
    }
    assert marked == set(FILES)
