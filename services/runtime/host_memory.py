"""Host memory that peers write to by address, and that can be moved out of their reach.

A peer's write names an address of this process. It cannot be recalled, but it can be made to miss. The
contents are moved to another address without a copy. The old address remains mapped as a *sink*: memory that
nothing reads. A late write to it harms neither the moved bytes, nor a later mapping at that address, nor the
code that writes.
"""

import ctypes
import mmap
import os
import threading
import weakref
from contextlib import suppress
from typing import Final, Protocol

MOVES_MAX: Final = 1024
"""Most times that one block of memory can be moved. Each move leaves a sink of its length in the address
space."""

HUGE: Final = 2 << 20
"""Size and alignment of a huge page, in bytes. With huge pages, gathering scattered KV pages misses the TLB
less often."""

_MREMAP_MAYMOVE: Final = 1
_MREMAP_FIXED: Final = 2
_MREMAP_DONTUNMAP: Final = 4
"""Flag of mremap that keeps the old address mapped. Needs Linux 5.7, and private anonymous memory."""
_NO_ACCESS: Final = 0
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_FIXED: Final = 0x10
_MADV_DONTNEED: Final = 4
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
"""Advice to madvise that makes the system provide pages at once. Needs Linux 5.14."""
_PIECE: Final = 8 << 20
"""Number of bytes that one call of madvise populates. The memory is populated piece by piece."""
_IDLE: Final = 19
_FAILED: Final = ctypes.c_void_p(-1).value

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class CannotMove(Exception):
    """The memory could not be moved to another address. The text says why."""


class Movable(Protocol):
    """Memory at an address that can be moved to another one together with its contents."""

    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int:
        """Length of the memory in bytes."""

    @property
    def device(self) -> str:
        """Device that holds the memory: "cpu" or "cuda:N"."""

    def move(self) -> None:
        """Move the memory's contents to another address. This process must neither read nor write them
        meanwhile.

        Raises CannotMove.
        """


class HostMemory:
    """A block of `length` zeroed, page-aligned bytes of main memory, at one address until `move`.

    The block and the sinks at its former addresses stay mapped as long as this object or a view of it exists.
    """

    def __init__(self, length: int) -> None:
        """Map the memory. `length`: bytes, more than 0. Raises MemoryError if the system refuses."""
        self.length = length
        self.device = "cpu"
        self._span = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
        place = _reserve(self._span)
        if _libc.mmap(place, self._span, _READ_WRITE, _PRIVATE | _MAP_FIXED, -1, 0) == _FAILED:
            refused = os.strerror(ctypes.get_errno())
            _libc.munmap(place, self._span)
            raise MemoryError(f"{length} bytes of memory: {refused}")
        _libc.madvise(place, self._span, _MADV_HUGEPAGE)  # best effort, without use for small memories
        self._bytes = _mapped(place, length, self._span)
        self._sinks: list[ctypes.Array[ctypes.c_char]] = []

    @property
    def address(self) -> int:
        return ctypes.addressof(self._bytes)

    @property
    def view(self) -> memoryview:
        """View of the memory's bytes at their present address. A view from before a move shows the sink."""
        return memoryview(self._bytes).cast("B")

    def populate(self) -> threading.Thread:
        """Make the system provide all pages of the memory now, in a thread of low priority. Return the
        thread.

        Otherwise the system provides each page at its first write, which makes a peer's first write many
        times slower. If the system cannot do this, nothing happens.
        """
        thread = threading.Thread(target=self._populate, name="populate", daemon=True)
        thread.start()
        return thread

    def _populate(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _IDLE)
        start = self.address
        for offset in range(0, self._span, _PIECE):
            if self.address == start:  # no thread has moved it meanwhile
                _libc.madvise(start + offset, min(_PIECE, self._span - offset), _MADV_POPULATE_WRITE)

    def move(self) -> None:
        """Move the memory's contents to another address. Nothing may read or write them meanwhile.

        Later writes of peers to the old address land in the sink. Hardware that has registered the pages,
        such as a network card, must have released them before.

        Raises CannotMove after MOVES_MAX moves, on a kernel that cannot move memory, or if the system refuses
        the address space. Nothing has changed then.
        """
        if len(self._sinks) >= MOVES_MAX:
            raise CannotMove(f"{self.length} bytes of memory were moved {MOVES_MAX} times already")
        try:
            place = _reserve(self._span)
        except MemoryError as error:
            raise CannotMove(str(error)) from error
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        if _libc.mremap(self.address, self._span, self._span, flags, place) == _FAILED:
            refused = os.strerror(ctypes.get_errno())
            _libc.munmap(place, self._span)
            raise CannotMove(f"{self.length} bytes of memory cannot be moved: {refused}")
        for sink in self._sinks:  # late writes landed there, which nothing reads
            _libc.madvise(ctypes.addressof(sink), self._span, _MADV_DONTNEED)
        self._sinks.append(self._bytes)
        self._bytes = _mapped(place, self.length, self._span)


def _reserve(span: int) -> int:
    """Reserve `span` bytes of address space and return their address, aligned for huge pages if `span` is
    long enough."""
    slack = HUGE if span >= HUGE else 0
    start = _libc.mmap(None, span + slack, _NO_ACCESS, _PRIVATE, -1, 0)
    if start == _FAILED:
        raise MemoryError(f"{span} bytes of address space: {os.strerror(ctypes.get_errno())}")
    place: int = start + (-start % HUGE if slack else 0)
    for edge, length in ((start, place - start), (place + span, start + slack - place)):
        if length:
            _libc.munmap(edge, length)
    return place


def _mapped(place: int, length: int, span: int) -> ctypes.Array[ctypes.c_char]:
    """Return the `length` bytes at the address `place`. They are unmapped when nothing refers to them any
    more."""
    buffer = (ctypes.c_char * length).from_address(place)
    weakref.finalize(buffer, _libc.munmap, place, span).atexit = False
    return buffer
