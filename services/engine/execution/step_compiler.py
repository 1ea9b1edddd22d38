"""Where does the compiled step of a model come from?

`step.c` is compiled for this machine's processor and a model's numbers by the first worker that wants it,
with the C compiler that is there, and kept: beside its source where that was done ahead (as the images do it,
which have no compiler), else

    $XDG_CACHE_HOME/baton/kernels/step-FINGERPRINT.so

under the fingerprint of its source and of how it is compiled. It appears by one rename, and who finds another
process compiling waits for what that makes: the workers of a first start come up at once. Its threads are
those of torch, whose OpenMP library is in the process already: none is linked.
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
"""Weights that are codes, of 8 bits or 4, with scales of their own."""
OPTIONS: Final = {"fma3": "fma", "amx_tile": "amx-tile", "amx_bf16": "amx-bf16"}
"""The compiler's names, where they are others than torch's."""
WRITABLE_BY_OTHERS: Final = 0o022
DEADLINE_S: Final = 120.0
"""Of each of a compiler's two runs."""
WAIT_S: Final = 2 * DEADLINE_S
LOCK_POLL_S: Final = 0.1
ARCH_PRCTL: Final = 158
ARCH_REQ_XCOMP_PERM: Final = 0x1023
XTILEDATA: Final = 18


class KernelUnavailable(Exception):
    """There is no kernel for this machine. The text says why."""


@dataclass(frozen=True, slots=True)
class Build:
    """One way to compile it."""

    numbers: torch.dtype
    """Of the model: keys and values are kept in them."""
    products: torch.dtype
    """What is multiplied."""
    weights: torch.dtype
    needs: tuple[str, ...]
    """What the CPU has to know, by torch's names."""

    @property
    def flags(self) -> tuple[str, ...]:
        instructions = (f"-m{OPTIONS.get(each, each.replace('_', ''))}" for each in self.needs)
        sizes = {"NUMBER": self.products, "KEPT": self.numbers, "WEIGHT": self.weights}
        return (*FLAGS, *(f"-D{name}={8 * of.itemsize}" for name, of in sizes.items()), *instructions)

    @property
    def block(self) -> int:
        """Outs of a weight that lie side by side: two vectors in float32."""
        return 32 if set(AVX512) <= set(self.needs) else 16

    @property
    def rows(self) -> int:
        """That are multiplied at once, at most."""
        return 32 if set(AMX) <= set(self.needs) else 8

    @property
    def name(self) -> str:
        """Of its library."""
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
"""The best for a CPU first."""


def builds(numbers: torch.dtype) -> list[Build]:
    """Those that this CPU can run. Raises KernelUnavailable when there is none."""
    told = torch.cpu.get_capabilities()
    known = [each for each in BUILDS if each.numbers is numbers and all(map(told.get, each.needs))]
    if not known:
        raise KernelUnavailable(f"there is no kernel of {numbers} for this CPU")
    return known


@dataclass(frozen=True, slots=True)
class Kernel:
    """A build's function, and what it is given."""

    step: Any
    products: torch.dtype
    weights: torch.dtype
    block: int
    rows: int


@cache
def kernel(numbers: torch.dtype, weights: torch.dtype) -> Kernel:
    """The compiled function, loaded once in a process, by the best build that can be had. Raises
    KernelUnavailable with why the best one cannot."""
    failed: list[KernelUnavailable] = []
    for build in builds(numbers):
        if build.weights is weights:
            try:
                _ask_for(build)
                step = found(build)
            except KernelUnavailable as error:
                failed.append(error)
                continue
            if failed:
                log.info("steps are not compiled for all that this CPU knows", why=str(failed[0]))
            return Kernel(step, build.products, weights, build.block, build.rows)
    raise (*failed, KernelUnavailable(f"there is no kernel of {numbers} over weights of {weights}"))[0]


def _ask_for(build: Build) -> None:
    """Of Linux, what a process has to ask for before it uses it: AMX's tiles. Raises KernelUnavailable."""
    if not set(AMX) <= set(build.needs):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(*map(ctypes.c_long, (ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA))):
        raise KernelUnavailable(f"no use of AMX is allowed: {os.strerror(ctypes.get_errno())}")


def found(build: Build) -> Any:
    """The function, compiled now if it is not there yet. Raises KernelUnavailable."""
    try:
        ahead, kept = SOURCE.with_name(build.name), cache_root() / "kernels" / build.name
        if ahead.is_file():
            return _load(ahead)
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        told = kept.parent.stat()
        if told.st_uid != os.getuid() or told.st_mode & WRITABLE_BY_OTHERS:
            raise KernelUnavailable(f"{kept.parent} is not this user's alone")
        damaged = kept.is_file()
        if damaged:
            with suppress(KernelUnavailable):  # cut short, or made for another system
                return _load(kept)
        with _alone(kept.parent):
            return _load(kept) if kept.is_file() and not damaged else compiled(build, kept)
    except (OSError, StartupError) as error:  # StartupError: there is no home
        raise KernelUnavailable(f"{type(error).__name__}: {error}") from error


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """While no other process compiles into `directory`. After `WAIT_S`, and on a file system that locks no
    directories, several may: that costs time, and the last one's is kept."""
    place = os.open(directory, os.O_RDONLY)
    try:
        ends = monotonic() + WAIT_S
        while monotonic() < ends:
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                sleep(LOCK_POLL_S)
            except OSError:
                break
        yield
    finally:
        os.close(place)


def compiled(build: Build, target: Path) -> Any:
    """Compile it to `target`, which appears once it was loaded. Raises KernelUnavailable or OSError."""
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
    # In two steps: the linker is not told of OpenMP.
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
        said = [line for line in lines if "error" in line.lower()] or lines or [f"exit {ended.returncode}"]
        raise KernelUnavailable(f"{command[0]}: {said[0]}")


if __name__ == "__main__":  # where an image is built, on a machine of the same kind, if not the same CPU
    if machine() == MACHINE:
        for each in BUILDS:
            compiled(each, SOURCE.with_name(each.name))
