"""Tests that the transfer library leaves the code of the C library alone once the memory hooks are installed.

A rewrite could crash a thread that is inside the code at that moment. The tests compare the code before and
after."""

import json
import subprocess
import sys

SCRIPT = """
import ctypes, json, sys
from baton.ids import Incarnation
from baton.runtime.host_memory import HostMemory
from baton.transfer.transfer_protocol import Region
from baton.transfer.nixl import NixlTransfer
from baton.transfer.nixl_library import install_memory_hooks

libc = ctypes.CDLL(None)

def code():
    calls = ("mmap", "munmap", "mremap", "madvise", "brk")
    return [ctypes.string_at(ctypes.cast(getattr(libc, each), ctypes.c_void_p), 16).hex() for each in calls]

seen = [code()]
if "early" in sys.argv:
    install_memory_hooks()
seen.append(code())
memory = HostMemory(1 << 20)
transfer = NixlTransfer(Incarnation(7))
transfer.register(Region("kv", memory.address, memory.length))
transfer.endpoint()
seen.append(code())
transfer.close()
print(json.dumps(seen))
"""


def codes(*words: str) -> list[list[str]]:
    """Return the first bytes of some of the C library's functions at the start, before the transfer is made,
    and after."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_the_first_agent_alone_rewrites_the_c_library() -> None:
    start, before, after = codes("early")
    assert start != before, "this UCX rewrites nothing: the hooks need not come first any more"
    assert before == after


def test_without_them_a_transfer_rewrites_it_under_whatever_runs() -> None:
    start, before, after = codes()
    assert start == before
    assert before != after
