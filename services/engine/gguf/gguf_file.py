"""Reader that reads a GGUF file once and in little memory, while the transformers library converts it.

The library reads a file anew for its configuration, its tokenizer and its weights, with several objects for
every vocabulary entry. It computes a tensor's numbers in small pieces, which it then joins. This reader
replaces its own, in a process that does nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quant_shape_from_byte_shape

STRIP: Final = 2**20
"""Elements of a tensor that are converted at once: numbers, or bytes of quantized blocks."""
PLAIN: Final = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
"""GGUF tensor types whose elements are plain numbers, not quantized blocks."""


class Reader(GGUFReader):  # type: ignore[misc]
    """GGUF reader whose fields are plain arrays.

    The base class makes views of a memory map, which take ten times the time and memory.
    """

    @property
    def data(self) -> Any:
        """The bytes of the GGUF file."""
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = np.asarray(mapped)


def read(file: str | PathLike[str]) -> GGUFReader:
    """Return the contents of a GGUF file, which is read only once in a process.

    Raises the errors of the gguf package's reader.
    """
    return _read(Path(file).resolve())


@cache
def _read(file: Path) -> GGUFReader:
    return Reader(file)


def numbers_of(data: Any, kind: GGMLQuantizationType) -> Any:
    """Return the numbers of a tensor in float32. `data`: its bytes in the file. `kind`: its GGUF type."""
    if kind is GGMLQuantizationType.F32:
        return data.view(np.float32)
    shape = data.shape if kind in PLAIN else quant_shape_from_byte_shape(data.shape, kind)
    numbers = np.empty(shape, np.float32)
    rows, begin = numbers.reshape(-1, shape[-1]), 0
    for strip in strips_of(data, kind):
        rows[begin : begin + len(strip)] = strip
        begin += len(strip)
    return numbers


def strips_of(data: Any, kind: GGMLQuantizationType) -> Iterator[Any]:
    """Yield the numbers of a tensor in float32, some rows at a time: [rows, columns].

    `data`: its bytes in the file. `kind`: its GGUF type.
    """
    rows = data.reshape(-1, data.shape[-1])
    each = max(1, STRIP // max(1, rows.shape[-1]))
    for begin in range(0, len(rows), each):
        yield dequantize(rows[begin : begin + each], kind)


@contextmanager
def replacing_library_reader() -> Iterator[None]:
    """Make the transformers library read GGUF files by this module's functions within the context."""
    library: Any = gguf
    before = library.GGUFReader, library.dequantize
    library.GGUFReader, library.dequantize = read, numbers_of
    try:
        yield
    finally:
        library.GGUFReader, library.dequantize = before
        _read.cache_clear()
