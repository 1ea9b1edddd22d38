"""Names of functions in a namespace of the Responses API.

Pure.
"""

from typing import Final

BETWEEN: Final = "__"
"""Separator of a namespace and a function's name, in the model's view."""


def namespaced_name(name: str, namespace: str | None) -> str:
    """Return the name of a function as the model sees it."""
    return name if namespace is None else f"{namespace}{BETWEEN}{name}"
