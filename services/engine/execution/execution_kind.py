"""The kinds of execution: how the steps of a model are computed."""

from enum import StrEnum


class ExecutionKind(StrEnum):
    """How the steps of a model are computed."""

    LIBRARY = "library"
    """By the model library's definition with our attention, all rows together."""
    ROW_BY_ROW = "row by row"
    """By the model library's definition with its own attention, one row after the other."""
    FUSED = "fused"
    """By our decoder, in few calls."""
    COMPILED = "compiled"
    """By one call of the compiled step, on a CPU."""
