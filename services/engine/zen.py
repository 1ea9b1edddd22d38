"""Which products and norms does ZenDNN compute for us?

zentorch is AMD's extension of torch for x86 CPUs. Its library of operators alone is loaded: the package's
Python would bring torch's compiler with it. Each release is built for one of torch. Where it is missing, was
built for another, or the CPU has no products of bfloat16, or those of AMX, which oneDNN knows better, torch's
own operators do.
"""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from services.runtime.logging import Log

log = Log(__name__)

PACKAGE: Final = "zentorch"
LIBRARY: Final = "libzentorch.so"
DEADLY: Final = (signal.SIGABRT, signal.SIGSEGV)
SIGACTION_BYTES_MAX: Final = 512
"""More than the C library's `struct sigaction` takes on any machine."""
OPERATORS: Final = (
    "zentorch_weight_prepack_for_linear",
    "zentorch_linear_unary",
    "zentorch_rms_norm",
    "zentorch_add_rms_norm_",
)


def zen_for(weight: torch.Tensor) -> Any | None:
    """ZenDNN's operators, where there are some that compute with a weight like this one."""
    fits = weight.device.type == "cpu" and weight.dtype is torch.bfloat16
    return operators() if fits else None


@cache
def operators() -> Any | None:
    """Those for bfloat16 on this CPU; loaded once. A line of the log says why there are none, if there could
    be some."""
    told = torch.cpu.get_capabilities()
    if not told.get("avx512_bf16") or told.get("amx_bf16"):
        return None
    try:
        release, package = version(PACKAGE), find_spec(PACKAGE)
    except PackageNotFoundError:
        return None
    if package is None or package.origin is None or _minor(release) != _minor(torch.__version__):
        ours = torch.__version__
        log.info("ZenDNN is not used: it was built for another torch", zentorch=release, torch=ours)
        return None
    try:
        with _signals_as_they_are():
            # Global, as the package itself does it.
            ctypes.CDLL(str(Path(package.origin).with_name(LIBRARY)), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
        for name in OPERATORS:
            _ = getattr(torch.ops.zentorch, name)
    except (OSError, AttributeError) as error:
        log.warning("ZenDNN is not used: its operators cannot be loaded", error=str(error))
        return None
    return torch.ops.zentorch


@contextmanager
def _signals_as_they_are() -> Iterator[None]:
    """The library has one in it (libxsmm) that, as it is loaded, puts itself in the way of the signals a
    process dies of, and takes a lock there: a process whose heap is broken would hang instead of end."""
    kept = {number: ctypes.create_string_buffer(SIGACTION_BYTES_MAX) for number in DEADLY}
    libc = ctypes.CDLL(None)
    for number, action in kept.items():
        libc.sigaction(number, None, action)
    try:
        yield
    finally:
        for number, action in kept.items():
            libc.sigaction(number, action, None)


def _minor(release: str) -> list[str]:
    return release.split(".")[:2]


class ZenLinear:
    """A product over ZenDNN's own layout of a weight, which serves a single row as well as many."""

    def __init__(self, zen: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._width = len(weight)
        self._weight = zen.zentorch_weight_prepack_for_linear(weight.contiguous())
        self._bias = bias
        self._run: Any = zen.zentorch_linear_unary.default

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if not len(rows):  # which the library takes for a mistake
            return rows.new_empty(0, self._width)
        out: torch.Tensor = self._run(rows, self._weight, self._bias, is_weight_prepacked=True)
        return out
