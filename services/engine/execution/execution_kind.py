"""The kinds of execution: how the steps of a model are computed."""

from enum import StrEnum


class ExecutionKind(StrEnum):
    """Ways to compute the steps of a model."""

    LIBRARY = "library"
    """The model library's definition with our attention, all rows together."""
    ROW_BY_ROW = "row by row"
    """The model library's definition with its own attention, one row after the other."""
    FUSED = "fused"
    """Our decoder, in few calls."""
    COMPILED = "compiled"
    """One call of the compiled step, on a CPU."""
