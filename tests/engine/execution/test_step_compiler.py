"""Tests that the best available kernel is compiled once, and that the reason is logged if there is none."""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.execution import step_compiler
from baton.engine.execution.step_compiler import (
    AVX2,
    AVX512,
    FLAGS,
    Build,
    KernelUnavailable,
    load_or_compile,
)
from tests.engine.execution.compiled_kernels import (
    BUILDS,
    CAPABILITIES,
    PLAIN,
    Directory,
    filled,
    known,
    load,
    logits_of,
    needs_kernel,
)
from tests.engine.executions import is_compiled


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directory of the kernel cache, with no kernel loaded or prebuilt. Kernels are compiled without
    optimisation."""
    source = tmp_path / step_compiler.SOURCE.name
    source.write_bytes(step_compiler.SOURCE.read_bytes())
    monkeypatch.setattr(step_compiler, "SOURCE", source)
    monkeypatch.setattr(step_compiler, "FLAGS", (*step_compiler.FLAGS, "-O0"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    step_compiler.kernel.cache_clear()
    yield tmp_path / "baton" / "kernels"
    step_compiler.kernel.cache_clear()


@pytest.mark.parametrize(
    ("told", "numbers"),
    [
        ({}, torch.float32),
        ({"avx2": True}, torch.float32),
        ({"avx2": True}, torch.bfloat16),
        (dict.fromkeys((*AVX512, "avx512_bf16"), True), torch.float16),
    ],
)
def test_there_is_none_for_other_cpus(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, bool], numbers: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told)
    with pytest.raises(KernelUnavailable, match="this CPU"):
        step_compiler.kernel(numbers, torch.bfloat16)
    assert not empty_cache.exists()


@needs_kernel
def test_the_widest_instructions_of_a_cpu_are_used(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Build] = []
    monkeypatch.setattr(step_compiler, "load_or_compile", asked.append)
    for told in (CAPABILITIES, {"avx2": True, "fma3": True}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda told=told: told)
        step_compiler.kernel(torch.float32, torch.float32)
        step_compiler.kernel.cache_clear()
    wide = known(BUILDS["in float32"])
    assert asked == [
        BUILDS["in float32" if wide else "in float32 by AVX2"],
        BUILDS["in float32 by AVX2"],
    ]


@needs_kernel
def test_amx_is_used_where_linux_lets_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Linux is asked on this machine whether the process may use AMX, whatever capabilities the CPU
    reports."""
    caplog.set_level(logging.INFO)
    amx, without = BUILDS["in bfloat16 by AMX"], BUILDS["in bfloat16"]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(amx.needs, True))
    monkeypatch.setattr(step_compiler, "load_or_compile", lambda build: build)
    step_compiler.kernel.cache_clear()
    chosen = amx if known(amx) else without
    assert step_compiler.kernel(torch.bfloat16, torch.bfloat16).step is chosen
    assert step_compiler.kernel(torch.bfloat16, torch.bfloat16).rows == chosen.rows
    said = [vars(record)["baton_fields"]["why"] for record in caplog.records]
    assert [each.startswith("no use of AMX is allowed") for each in said] == [True] * (chosen is without)
    step_compiler.kernel.cache_clear()


@needs_kernel
def test_where_the_best_cannot_be_compiled_the_next_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys((*AVX512, *AVX2), True))
    best, next_one = BUILDS["in float32"], BUILDS["in float32 by AVX2"]

    def only_next(build: Build) -> str:
        if build is best:
            raise KernelUnavailable("no such instruction")
        assert build is next_one
        return "the next one"

    def neither(build: Build) -> str:
        raise KernelUnavailable("no such instruction" if build is best else "out of space")

    step_compiler.kernel.cache_clear()
    monkeypatch.setattr(step_compiler, "load_or_compile", only_next)
    assert step_compiler.kernel(torch.float32, torch.float32).step == "the next one"
    step_compiler.kernel.cache_clear()
    monkeypatch.setattr(step_compiler, "load_or_compile", neither)
    with pytest.raises(KernelUnavailable, match="no such instruction"):
        step_compiler.kernel(torch.float32, torch.float32)


@needs_kernel
def test_it_is_compiled_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_or_compile(PLAIN) is not None
    [library] = empty_cache.iterdir()
    made = library.stat().st_mtime_ns
    monkeypatch.setattr(step_compiler, "COMPILERS", ())
    assert load_or_compile(PLAIN) is not None
    assert library.stat().st_mtime_ns == made
    monkeypatch.setattr(step_compiler, "FLAGS", (*step_compiler.FLAGS, "-g"))
    with pytest.raises(KernelUnavailable, match="there is no C compiler"):
        load_or_compile(PLAIN)


@needs_kernel
def test_who_finds_another_process_compiling_takes_what_that_makes(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers of a first start do so, each with two cores to compile on."""
    load_or_compile(PLAIN)
    [library] = empty_cache.iterdir()
    aside = library.rename(empty_cache.parent / library.name)
    other = os.open(empty_cache, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    waits = []

    def it_ends(_: float) -> None:
        waits.append(aside.rename(library))
        os.close(other)

    monkeypatch.setattr(step_compiler, "sleep", it_ends)
    monkeypatch.setattr(step_compiler, "COMPILERS", ())
    assert load_or_compile(PLAIN) is not None
    assert waits == [library]


@needs_kernel
def test_nobody_waits_for_ever_for_another_that_compiles(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_cache.mkdir(parents=True, mode=0o700)
    other = os.open(empty_cache, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    monkeypatch.setattr(step_compiler, "WAIT_S", 0.0)
    assert load_or_compile(PLAIN) is not None
    os.close(other)


@needs_kernel
def test_what_was_cut_short_is_compiled_anew(empty_cache: Path) -> None:
    load_or_compile(PLAIN)
    [library] = empty_cache.iterdir()
    whole = library.read_bytes()
    library.unlink()
    library.write_bytes(whole[:100])
    assert load_or_compile(PLAIN) is not None
    assert library.stat().st_size == len(whole)


@needs_kernel
@pytest.mark.emulated
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_the_compiler_has_nothing_to_say(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, build: Build
) -> None:
    """Whatever this CPU knows: nothing is emulated, nor called. As it is compiled for workers, since much is
    only seen by a compiler that optimises."""
    monkeypatch.setattr(step_compiler, "FLAGS", (*FLAGS, "-Wall", "-Wextra", "-Werror"))
    assert load_or_compile(build) is not None


@needs_kernel
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("COMPILERS", ("no-such-compiler",), "there is no C compiler (no-such-compiler)"),
        ("COMPILERS", ("false",), "exit 1"),
        ("FLAGS", ("-no-such-flag",), "no-such-flag"),
        ("FUNCTION", "no_such_function", "no_such_function"),
        ("DEADLINE_S", 0.0, "took more than 0 s"),
        ("SOURCE", Path("/nowhere/step.c"), "FileNotFoundError"),
    ],
)
def test_what_cannot_be_compiled_is_said_and_steps_go_by_calls(
    directory: Directory,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: Any,
    why: str,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(step_compiler, name, value)
    engine = load(directory("three queries a head"), dtype=torch.float32)
    assert not is_compiled(engine)
    assert [record.getMessage() for record in caplog.records] == ["steps are not compiled"]
    assert why in vars(caplog.records[0])["baton_fields"]["why"]
    assert not empty_cache.exists() or not [*empty_cache.iterdir()]
    logits_of(engine, filled(engine))


@needs_kernel
def test_a_cache_that_cannot_be_used_is_said(empty_cache: Path) -> None:
    empty_cache.parent.mkdir()
    empty_cache.write_text("")
    with pytest.raises(KernelUnavailable, match="FileExistsError"):
        load_or_compile(PLAIN)


@needs_kernel
def test_what_cannot_be_kept_leaves_nothing_behind(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each start on a full disk would leave another partial file."""

    def full(*_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(KernelUnavailable, match="No space left"):
        load_or_compile(PLAIN)
    assert not [*empty_cache.iterdir()]


@needs_kernel
def test_nothing_is_loaded_from_where_others_may_write(empty_cache: Path) -> None:
    load_or_compile(PLAIN)
    empty_cache.chmod(0o777)
    with pytest.raises(KernelUnavailable, match="is not this user's alone"):
        load_or_compile(PLAIN)


@needs_kernel
def test_it_can_be_compiled_ahead_beside_its_source(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_or_compile(PLAIN)
    [library] = empty_cache.iterdir()
    library.rename(step_compiler.SOURCE.with_name(library.name))
    empty_cache.rmdir()
    monkeypatch.setattr(step_compiler, "COMPILERS", ())
    assert load_or_compile(PLAIN) is not None
    assert not empty_cache.exists()
