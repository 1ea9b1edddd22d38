"""Compiler of the CPU step in C, and cache of the compiled libraries.

`step.c` is compiled for this machine's processor and a model's number formats. The first worker that needs it
compiles it with the machine's C compiler. Container images, which have no compiler, contain compiled
libraries next to the source. Otherwise libraries are cached in

    $XDG_CACHE_HOME/baton/kernels/step-FINGERPRINT.so

by the fingerprint of the source and of the compiler's options. A library appears by one rename. A process
that finds another one compiling waits for its result, so that all workers of a first start come up at once.
The library uses torch's OpenMP threads, whose library is in the process already. None is linked.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from platform import machine
from time import monotonic, sleep
from typing import Any, Final

import torch

from baton.models.conversion_cache import cache_root
from baton.runtime.errors import StartupError
from baton.runtime.logging import Log

log = Log(__name__)

SOURCE: Final = Path(__file__).with_name("step.c")
FUNCTION: Final = "baton_step"
COMPILERS: Final = ("gcc", "cc")
FLAGS: Final = (
    *("-std=gnu11", "-O3", "-fno-strict-aliasing", "-ffp-contract=fast", "-fopenmp", "-fPIC"),
    "-falign-loops=64",  # a prompt's products are a tenth slower where a loop begins within a cache line
)
AVX2: Final = ("avx2", "fma3")
AVX512: Final = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "fma3")
AMX: Final = ("amx_tile", "amx_bf16")
MACHINE: Final = "x86_64"
CODES: Final = torch.int8
"""Dtype that stands for quantized weights: codes of 8 or 4 bits with scales of their own."""
OPTIONS: Final = {"fma3": "fma", "amx_tile": "amx-tile", "amx_bf16": "amx-bf16"}
"""The C compiler's names of instruction sets, by torch's names, where the two differ."""
WRITABLE_BY_OTHERS: Final = 0o022
DEADLINE_S: Final = 120.0
"""Longest run of the C compiler in seconds. It runs twice for a library."""
WAIT_S: Final = 2 * DEADLINE_S
LOCK_POLL_S: Final = 0.1
ARCH_PRCTL: Final = 158
ARCH_REQ_XCOMP_PERM: Final = 0x1023
XTILEDATA: Final = 18


class KernelUnavailable(Exception):
    """There is no compiled step for this machine. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Build:
    """One variant of the compiled library: its number formats and instruction sets."""

    numbers: torch.dtype
    """Dtype of the keys and values in KV pages."""
    products: torch.dtype
    """Dtype of the inputs by which the compiled step multiplies weights."""
    weights: torch.dtype
    needs: tuple[str, ...]
    """Instruction sets that the CPU must have, by torch's names."""

    @property
    def flags(self) -> tuple[str, ...]:
        instructions = (f"-m{OPTIONS.get(each, each.replace('_', ''))}" for each in self.needs)
        sizes = {"NUMBER": self.products, "KEPT": self.numbers, "WEIGHT": self.weights}
        return (*FLAGS, *(f"-D{name}={8 * of.itemsize}" for name, of in sizes.items()), *instructions)

    @property
    def block(self) -> int:
        """Number of a weight's output rows that are stored as one block: as many as two of the CPU's vectors
        hold in float32."""
        return 32 if set(AVX512) <= set(self.needs) else 16

    @property
    def rows(self) -> int:
        """Most input rows that the compiled function multiplies by a weight at once."""
        return 32 if set(AMX) <= set(self.needs) else 8

    @property
    def name(self) -> str:
        """File name of the compiled library. It includes the fingerprint of source and compiler options."""
        made_of = SOURCE.read_bytes() + " ".join(self.flags).encode()
        return f"{SOURCE.stem}-{hashlib.sha256(made_of).hexdigest()[:16]}.so"


BUILDS: Final = (
    Build(torch.bfloat16, torch.bfloat16, torch.bfloat16, (*AVX512, "avx512_bf16", *AMX)),
    Build(torch.bfloat16, torch.bfloat16, torch.bfloat16, (*AVX512, "avx512_bf16")),
    *(
        Build(numbers, torch.float32, weights, instructions)
        for numbers, weights in (
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.bfloat16),
            (torch.float32, torch.float32),
        )
        for instructions in (AVX512, AVX2)
    ),
    *(
        Build(numbers, torch.float32, CODES, instructions)
        for numbers in (torch.bfloat16, torch.float32)
        for instructions in (AVX512, (*AVX2, "f16c"))
    ),
)
"""All variants of the compiled library, in an order in which the best one that a CPU can run comes first."""


def supported_builds(numbers: torch.dtype) -> list[Build]:
    """Return the variants for keys and values of dtype `numbers` that this CPU can run, the best first.

    Raises KernelUnavailable if there is none.
    """
    capabilities = torch.cpu.get_capabilities()
    known = [each for each in BUILDS if each.numbers is numbers and all(map(capabilities.get, each.needs))]
    if not known:
        raise KernelUnavailable(f"there is no kernel of {numbers} for this CPU")
    return known


@dataclass(frozen=True, slots=True)
class Kernel:
    """The compiled C function of a variant, and the weight layout that it expects."""

    step: Any
    products: torch.dtype
    weights: torch.dtype
    block: int
    rows: int


@cache
def kernel(numbers: torch.dtype, weights: torch.dtype) -> Kernel:
    """Return the compiled function of the best variant that this machine can run, loaded once in a process.

    `numbers`: dtype of keys and values. `weights`: dtype of weights. Raises KernelUnavailable with the reason
    why the best variant cannot be used.
    """
    failed: list[KernelUnavailable] = []
    for build in supported_builds(numbers):
        if build.weights is weights:
            try:
                _request_tiles(build)
                step = load_or_compile(build)
            except KernelUnavailable as error:
                failed.append(error)
                continue
            if failed:
                log.info("steps are not compiled for all that this CPU knows", why=str(failed[0]))
            return Kernel(step, build.products, weights, build.block, build.rows)
    raise (*failed, KernelUnavailable(f"there is no kernel of {numbers} over weights of {weights}"))[0]


def _request_tiles(build: Build) -> None:
    """Request permission from Linux to use AMX tiles, if the variant needs them. Raises KernelUnavailable."""
    if not set(AMX) <= set(build.needs):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(*map(ctypes.c_long, (ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA))):
        raise KernelUnavailable(f"no use of AMX is allowed: {os.strerror(ctypes.get_errno())}")


def load_or_compile(build: Build) -> Any:
    """Return the compiled function of `build`, compiling its library first if none is cached.

    Raises KernelUnavailable.
    """
    try:
        prebuilt, cached = SOURCE.with_name(build.name), cache_root() / "kernels" / build.name
        if prebuilt.is_file():
            return _load(prebuilt)
        cached.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        capabilities = cached.parent.stat()
        if capabilities.st_uid != os.getuid() or capabilities.st_mode & WRITABLE_BY_OTHERS:
            raise KernelUnavailable(f"{cached.parent} is not this user's alone")
        is_damaged = cached.is_file()
        if is_damaged:
            with suppress(KernelUnavailable):  # truncated, or compiled for another system
                return _load(cached)
        with _alone(cached.parent):
            return _load(cached) if cached.is_file() and not is_damaged else compile_kernel(build, cached)
    except (OSError, StartupError) as error:  # StartupError: no home directory
        raise KernelUnavailable(f"{type(error).__name__}: {error}") from error


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Wait until no other process compiles into `directory`, and exclude others within the context.

    After `WAIT_S`, and on file systems without locks on directories, several processes may compile at once.
    That only costs time: the last library replaces the others.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        ends = monotonic() + WAIT_S
        while monotonic() < ends:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                sleep(LOCK_POLL_S)
            except OSError:
                break
        yield
    finally:
        os.close(handle)


def compile_kernel(build: Build, target: Path) -> Any:
    """Compile the library of `build` to the file `target`, which appears only after a test that it can be
    loaded.

    Returns the compiled function. Raises KernelUnavailable or OSError.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise KernelUnavailable(f"there is no C compiler ({' or '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory(dir=target.parent) as part:
        made = _compile(compiler, build, Path(part))
        function = _load(made)
        made.chmod(0o755)
        made.rename(target)
    return function


def _load(library: Path) -> Any:
    try:
        function = getattr(ctypes.CDLL(str(library), mode=os.RTLD_NOW), FUNCTION)
    except (OSError, AttributeError) as error:
        raise KernelUnavailable(f"{library} cannot be loaded: {error}") from error
    function.restype = None
    return function


def _compile(compiler: str, build: Build, directory: Path) -> Path:
    made, library = directory / "step.o", directory / "step.so"
    # In two steps, so that the linker does not link OpenMP.
    _run([compiler, *build.flags, "-c", str(SOURCE), "-o", str(made)])
    _run([compiler, "-shared", str(made), "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    try:
        ended = subprocess.run(  # noqa: S603
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise KernelUnavailable(f"{command[0]} took more than {DEADLINE_S:.0f} s") from error
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        messages = (
            [line for line in lines if "error" in line.lower()] or lines or [f"exit {ended.returncode}"]
        )
        raise KernelUnavailable(f"{command[0]}: {messages[0]}")


if __name__ == "__main__":  # for images, on another CPU of the same architecture
    if machine() == MACHINE:
        for each in BUILDS:
            compile_kernel(each, SOURCE.with_name(each.name))
