"""Names of functions that stand in a namespace of the Responses API.

Pure.
"""

from typing import Final

BETWEEN: Final = "__"
"""Between a namespace and the name of its function, as the model reads it."""


def namespaced_name(name: str, namespace: str | None) -> str:
    """The name of a function as the model reads it."""
    return name if namespace is None else f"{namespace}{BETWEEN}{name}"
