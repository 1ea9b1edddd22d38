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
from contextlib import suppress
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
    *("-std=gnu11", "-O3", "-fno-strict-aliasing", "-fopenmp", "-fPIC"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
)
MACHINE: Final = "x86_64"
WRITABLE_BY_OTHERS: Final = 0o022
DEADLINE_S: Final = 120.0


class NotCompiled(Exception):
    """There is no kernel for this machine. The text says why."""


@cache
def kernel() -> Any | None:
    """The compiled function, loaded once in a process: where this CPU multiplies bfloat16, but not by AMX,
    which oneDNN knows, and the kernel is there or can be compiled. A line of the log says why there is none,
    if there could be one."""
    told = torch.cpu.get_capabilities()
    if not told.get("avx512_bf16") or told.get("amx_bf16"):
        return None
    try:
        return found()
    except NotCompiled as error:
        log.info("steps are not compiled", why=str(error))
        return None


def found() -> Any:
    """The function, compiled now if it is not there yet. Raises NotCompiled."""
    try:
        name = f"{SOURCE.stem}-{_fingerprint()}.so"
        ahead, kept = SOURCE.with_name(name), cache_root() / "kernels" / name
        if ahead.is_file():
            return _load(ahead)
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        told = kept.parent.stat()
        if told.st_uid != os.getuid() or told.st_mode & WRITABLE_BY_OTHERS:
            raise NotCompiled(f"{kept.parent} is not this user's alone")
        if kept.is_file():
            with suppress(NotCompiled):  # cut short, or made for another system
                return _load(kept)
        return compiled(kept)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise NotCompiled(f"{type(error).__name__}: {error}") from error


def compiled(target: Path) -> Any:
    """Compile it to `target`, which appears once it was loaded. Raises NotCompiled or OSError."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NotCompiled(f"there is no C compiler ({' or '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory() as part:
        made = _compile(compiler, Path(part))
        function = _load(made)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.stem, delete=False) as beside:
            beside.write(made.read_bytes())
        Path(beside.name).chmod(0o755)
        Path(beside.name).rename(target)
    return function


def _load(library: Path) -> Any:
    try:
        function = getattr(ctypes.CDLL(str(library), mode=os.RTLD_NOW), FUNCTION)
    except (OSError, AttributeError) as error:
        raise NotCompiled(f"{library} cannot be loaded: {error}") from error
    function.restype = None
    return function


def _compile(compiler: str, directory: Path) -> Path:
    made, library = directory / "step.o", directory / "step.so"
    # In two steps: the linker is not told of OpenMP.
    _run([compiler, *FLAGS, "-c", str(SOURCE), "-o", str(made)])
    _run([compiler, "-shared", str(made), "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    try:
        ended = subprocess.run(  # noqa: S603
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotCompiled(f"{command[0]} took more than {DEADLINE_S:.0f} s") from error
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        said = [line for line in lines if "error" in line] or lines or [f"exit {ended.returncode}"]
        raise NotCompiled(f"{command[0]}: {said[0]}")


def _fingerprint() -> str:
    return hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]


if __name__ == "__main__":  # where an image is built, on a machine of the same kind, if not the same CPU
    if machine() == MACHINE:
        compiled(SOURCE.with_name(f"{SOURCE.stem}-{_fingerprint()}.so"))
