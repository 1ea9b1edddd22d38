"""Where does the compiled step of a model come from?

`step.c` is compiled for this machine's processor by the first worker that wants it, with the C
compiler that is there, and kept: beside its source where that was done ahead (as the images do it, which have
no compiler), else

    $XDG_CACHE_HOME/baton/kernels/step-FINGERPRINT.so

under the fingerprint of its source and of how it is compiled. It appears by one rename. Its threads are those
of torch, whose OpenMP library is in the process already: none is linked.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from platform import machine
from typing import Any, Final

import torch

from services.runtime.logging import Log
from services.runtime.model_cache import cache_root

log = Log(__name__)

SOURCE: Final = Path(__file__).with_name("step.c")
FUNCTION: Final = "baton_step"
COMPILERS: Final = ("gcc", "cc")
FLAGS: Final = (
    *("-std=gnu11", "-O3", "-fno-strict-aliasing", "-fopenmp", "-fPIC", "-Wall", "-Wextra", "-Werror"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
)
MACHINE: Final = "x86_64"
DEADLINE_S: Final = 120.0


class NotCompiled(Exception):
    """There is no kernel for this machine. The text says why."""


@cache
def kernel() -> Any | None:
    """The compiled function, loaded once in a process: where this CPU multiplies bfloat16, and the kernel is
    there or can be compiled. A line of the log says why there is none, if there could be one."""
    if not torch.cpu.get_capabilities().get("avx512_bf16"):
        return None
    try:
        return load(compiled())
    except NotCompiled as error:
        log.info("steps are not compiled", why=str(error))
        return None


def load(library: Path) -> Any:
    """Raises NotCompiled."""
    try:
        function = getattr(ctypes.CDLL(str(library), mode=os.RTLD_NOW), FUNCTION)
    except (OSError, AttributeError) as error:
        raise NotCompiled(f"{library} cannot be loaded: {error}") from error
    function.restype = None
    return function


def compiled(directory: Path | None = None) -> Path:
    """The library, compiled now if it is not there yet: in `directory`, else in the cache. Raises
    NotCompiled."""
    name = f"{SOURCE.stem}-{_fingerprint()}.so"
    ahead = SOURCE.with_name(name)
    if directory is None and ahead.is_file():
        return ahead
    target = (directory or cache_root() / "kernels") / name
    if target.is_file():
        return target
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NotCompiled(f"there is no C compiler ({' or '.join(COMPILERS)})")
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=target.parent) as part:
            _compile(compiler, Path(part)).rename(target)
    except OSError as error:
        raise NotCompiled(f"{target.parent} cannot be used: {error}") from error
    return target


def _compile(compiler: str, directory: Path) -> Path:
    made, library = directory / "step.o", directory / "step.so"
    # In two steps: the linker is not told of OpenMP.
    _run([compiler, *FLAGS, "-c", str(SOURCE), "-o", str(made)])
    _run([compiler, "-shared", str(made), "-o", str(library), "-lm"])
    return library


def _run(command: list[str]) -> None:
    try:
        ended = subprocess.run(  # noqa: S603
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotCompiled(f"{command[0]} took more than {DEADLINE_S:.0f} s") from error
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or [f"exit {ended.returncode}"]
        raise NotCompiled(f"{command[0]}: {said[0]}")


def _fingerprint() -> str:
    return hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]


if __name__ == "__main__":  # where an image is built, on a machine of the same kind, if not the same CPU
    print(compiled(SOURCE.parent) if machine() == MACHINE else f"not for {machine()}")  # noqa: T201
