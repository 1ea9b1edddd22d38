"""Builds for AVX-512 and AMX that are emulated on a CPU with AVX2. The same source is compiled in the same
sizes for AVX2, with an `immintrin.h` from here that defines the missing instructions."""

from hashlib import sha256
from pathlib import Path
from typing import Final

from baton.engine.execution.step_compiler import AMX, AVX2, Build
from tests.suite.marks import starts

HEADER: Final = Path(__file__).with_name("immintrin.h")
FLAGS: Final = (
    *("-D__AVX512F__", f"-I{HEADER.parent}", "-Werror=implicit-function-declaration"),
    "-D__asm__(...)=",  # of what asks for a register for a whole vector, and computes nothing
    "-Wno-psabi",  # no such vector is passed to another object
)


class Emulated(Build):
    """A kernel build that runs on any CPU with AVX2 by emulating the CPU that it stands for."""

    @property
    def flags(self) -> tuple[str, ...]:
        starts("emulated")
        # A fraction of the time to compile, about the same to run; a level that a test adds wins.
        return (*("-O1" if flag == "-O3" else flag for flag in super().flags), *FLAGS)

    @property
    def block(self) -> int:
        return 32

    @property
    def name(self) -> str:
        return f"{sha256(HEADER.read_bytes()).hexdigest()[:16]}-{super().name}"


class EmulatedAmx(Emulated):
    @property
    def flags(self) -> tuple[str, ...]:
        return (*super().flags, "-D__AMX_BF16__")

    @property
    def rows(self) -> int:
        return 32


def emulated(build: Build) -> Emulated:
    kind = EmulatedAmx if set(AMX) <= set(build.needs) else Emulated
    return kind(build.numbers, build.products, build.weights, AVX2)
