"""Tests that a stage of large work returns freed memory, even if the C library would reserve it."""

import subprocess
import sys
from typing import Final

import pytest

PROGRAM: Final = """
import ctypes, threading, time
from pathlib import Path
from baton.runtime.memory_trimming import INTERVAL_S, trimming_memory

C = ctypes.CDLL(None)
C.malloc.restype, C.malloc.argtypes, C.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
MEGABYTE = 1 << 20
C.free(C.malloc(31 * MEGABYTE))  # from now on the C library takes large blocks from its heap

def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 // MEGABYTE

def blocks(size, count):
    made = []
    for _ in range(count):
        made.append(C.malloc(size))
        ctypes.memset(made[-1], 1, size)
        C.malloc(40_000)  # stays, and with it all that lies below it in a heap
    return made

def free(made):
    for each in made:
        C.free(each)
"""
WITHIN: Final = """
with trimming_memory():
    before = resident()
    large = blocks(4 * MEGABYTE, 60)
    assert resident() > before + 200
    free(large)
    end = time.monotonic() + 20 * INTERVAL_S
    while resident() > before + 40 and time.monotonic() < end:
        time.sleep(INTERVAL_S / 5)
    assert resident() < before + 40, f"freed blocks stay: {before} MiB before, {resident()} MiB after"
"""
AT_ITS_END: Final = """
before = resident()
try:
    with trimming_memory():
        free(blocks(100_000, 2400))
        raise KeyError
except KeyError:
    pass
assert resident() < before + 40, f"freed memory stays: {before} MiB before, {resident()} MiB after"
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("program", [WITHIN, AT_ITS_END], ids=["within", "at its end"])
def test_freed_memory_goes_back_to_the_system(program: str) -> None:
    ended = run(program)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("program", [WITHIN, AT_ITS_END])
def test_without_a_stage_it_stays(program: str) -> None:
    """This shows that the programs above can fail."""
    ended = run(program.replace("trimming_memory()", "__import__('contextlib').nullcontext()"))
    assert "stay" in ended.stderr
