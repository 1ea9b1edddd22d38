"""Kinds of execution: the methods by which the steps of a model are computed."""

from enum import StrEnum


class ExecutionKind(StrEnum):
    """Method by which the steps of a model are computed."""

    LIBRARY = "library"
    """The model's transformers implementation with our paged attention, all rows together."""
    ROW_BY_ROW = "row by row"
    """The model's transformers implementation with its own attention, one row after the other."""
    FUSED = "fused"
    """Our own decoder, which fuses operations of a layer into few calls."""
    COMPILED = "compiled"
    """A compiled C function that computes a whole step in one call, on a CPU."""
