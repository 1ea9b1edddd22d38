"""Tests that memory keeps every byte when it moves, and that no write to the old address changes one."""

import gc
import mmap
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from baton.runtime.host_memory import HUGE, MOVES_MAX, CannotMove, HostMemory

LENGTHS = [1, mmap.PAGESIZE, mmap.PAGESIZE + 1, HUGE - 1, 2 * HUGE + 5]


def mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


def given(address: int) -> int:
    """Return the bytes that the system has provided of the mapping at `address`."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(int(each.split()[1]) * 1024 for each in lines if each.startswith("Rss:"))
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.parametrize("length", LENGTHS)
def test_it_is_zeroed_writable_and_aligned(length: int) -> None:
    memory = HostMemory(length)
    assert (memory.length, memory.device) == (length, "cpu")
    assert bytes(memory.view) == bytes(length)
    assert memory.address % (HUGE if length >= HUGE else mmap.PAGESIZE) == 0
    memory.view[length - 1] = 7
    assert memory.view[length - 1] == 7


@pytest.mark.parametrize("length", LENGTHS)
def test_a_move_keeps_every_byte_at_another_address(length: int) -> None:
    memory = HostMemory(length)
    places = {memory.address}
    data = random.Random(length).randbytes(length)
    memory.view[:] = data
    for _ in range(3):
        memory.move()
        assert bytes(memory.view) == data
        assert memory.address % (HUGE if length >= HUGE else mmap.PAGESIZE) == 0
        places.add(memory.address)
    assert len(places) == 4


def test_what_is_written_to_an_old_address_is_read_nowhere() -> None:
    memory = HostMemory(HUGE)
    memory.view[:] = b"\x01" * HUGE
    sinks = []
    for _ in range(3):
        sinks.append(memory.view)
        memory.move()
        for sink in sinks:
            sink[:] = b"\xee" * HUGE
        assert bytes(memory.view) == b"\x01" * HUGE
    addresses = [memory.address]
    memory.move()
    addresses.append(memory.address)
    assert all(mapped(address) for address in addresses)


def test_new_memory_never_takes_an_address_that_a_peer_may_still_write_to() -> None:
    memory, old = HostMemory(HUGE), []
    others = []
    for _ in range(10):
        old.append(memory.address)
        memory.move()
        others.append(HostMemory(HUGE))
    assert not {memory.address, *(other.address for other in others)} & set(old)


def test_what_landed_in_a_sink_takes_no_memory_after_the_next_move() -> None:
    memory = HostMemory(16 * HUGE)
    before = resident()
    for _ in range(8):
        sink = memory.view
        memory.move()
        sink[:] = b"\xee" * len(sink)
    assert resident() - before < 3 * len(sink)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_moves_have_a_bound_and_a_refused_one_changes_nothing() -> None:
    memory = HostMemory(100)
    memory.view[:] = b"\x05" * 100
    for _ in range(MOVES_MAX):
        memory.move()
    address = memory.address
    with pytest.raises(CannotMove, match=f"100 bytes of memory were moved {MOVES_MAX} times"):
        memory.move()
    assert (memory.address, bytes(memory.view)) == (address, b"\x05" * 100)


def test_where_the_address_space_is_limited_a_move_is_refused_and_changes_nothing() -> None:
    """The limit holds for a whole process, so the test runs in one of its own."""
    code = f"""
import resource
from baton.runtime.host_memory import CannotMove, HostMemory
memory = HostMemory({256 * HUGE})
memory.view[-1] = 9
used = int(open("/proc/self/statm").read().split()[0]) * {mmap.PAGESIZE}
resource.setrlimit(resource.RLIMIT_AS, (used + {128 * HUGE}, -1))
address = memory.address
try:
    memory.move()
except CannotMove as error:
    assert "Cannot allocate memory" in str(error), error
    assert memory.address == address and memory.view[-1] == 9
    print("refused")
try:
    HostMemory({256 * HUGE})
except MemoryError as error:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("refused\nrefused\n", "")


def test_it_stays_mapped_for_as_long_as_anybody_looks_at_it_and_no_longer() -> None:
    memory = HostMemory(HUGE)
    first = memory.address
    memory.move()
    second, view = memory.address, memory.view
    view[0] = 3
    del memory
    gc.collect()
    assert not mapped(first), "a sink is the memory's own"
    assert view[0] == 3
    del view
    gc.collect()
    assert not mapped(second)


def test_the_process_ends_cleanly_while_views_are_held() -> None:
    code = (
        "from baton.runtime.host_memory import HostMemory\n"
        "memory = HostMemory(1 << 22); view = memory.view; memory.move(); kept = [memory, view]"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code], capture_output=True, timeout=60, env={**os.environ}
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_populated_memory_is_there_before_it_is_written_to_and_holds_what_was_written() -> None:
    memory = HostMemory(4 * HUGE)
    memory.view[5] = 7
    assert given(memory.address) < memory.length
    memory.populate().join(60)
    assert given(memory.address) >= memory.length
    assert memory.view[5] == 7


def test_memory_that_is_populated_may_be_moved_meanwhile() -> None:
    memory = HostMemory(64 * HUGE)
    memory.view[5] = 7
    thread = memory.populate()
    memory.move()
    thread.join(60)
    assert memory.view[5] == 7
