"""Names of functions that are in a namespace of the Responses API.

No I/O, clock or threads.
"""

from typing import Final

BETWEEN: Final = "__"
"""Separator between a namespace and a function's name, in the name that the model sees."""


def namespaced_name(name: str, namespace: str | None) -> str:
    """Return the name of a function as the model sees it, which begins with its namespace if it has one."""
    return name if namespace is None else f"{namespace}{BETWEEN}{name}"
