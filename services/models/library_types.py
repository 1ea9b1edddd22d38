"""Model types that the transformers library supports, read from its source without importing it.

An import takes seconds and loads the tensor library. If the library's source looks different than expected, a
set of types is empty, and no model is refused by it.
"""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

LIBRARY: Final = "transformers"
CONFIGURATIONS: Final = (
    ("models/auto/auto_mappings.py", "CONFIG_MAPPING_NAMES"),
    ("models/auto/configuration_auto.py", "CONFIG_MAPPING_NAMES"),
)
DRAWING: Final = (
    ("models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    ("models/auto/modeling_auto.py", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
)
GGUF_TABLES: Final = (
    ("integrations/ggml.py", "GGUF_CONFIG_MAPPING"),
    ("integrations/gguf/gguf_config_mapping.py", "GGUF_CONFIG_ARCHS"),
)


def library_version() -> str:
    """Return the installed version of the transformers library, or an empty text."""
    try:
        return version(LIBRARY)
    except PackageNotFoundError:
        return ""


@cache
def known_types() -> frozenset[str]:
    """Return the model types for which the transformers library has a configuration."""
    return _keys(CONFIGURATIONS)


@cache
def drawing_types() -> frozenset[str]:
    """Return the model types for which the transformers library has an implementation that generates text."""
    return _keys(DRAWING)


@cache
def gguf_types() -> frozenset[str]:
    """Return the model types whose GGUF files the transformers library reads."""
    return _keys(GGUF_TABLES) - {"general", "tokenizer"}


def _keys(tables: tuple[tuple[str, str], ...]) -> frozenset[str]:
    """Return the keys of some dictionaries in transformers' source, or an empty set if any of them is not
    found.

    `tables`: pairs of a file in the library and the name of a dictionary there.
    """
    spec = importlib.util.find_spec(LIBRARY)
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    found = [set(_table(folder / file, name)) for file, name in tables] if folder is not None else [set()]
    return frozenset().union(*found) if all(found) else frozenset()


def _table(file: Path, name: str) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return
    for node in tree.body:
        if _written(node) == name:
            yield from _first_words(node)


def _written(node: ast.stmt) -> str:
    """Return the name of the variable that a statement of Python source assigns to or extends, or an empty
    text."""
    target: ast.AST = node
    if isinstance(node, ast.Assign):
        target = node.targets[0]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        target = getattr(node.value.func, "value", node)
    return target.id if isinstance(target, ast.Name) else ""


def _first_words(node: ast.AST) -> Iterator[str]:
    """Yield the strings in a statement of Python source that are keys of a dictionary, or the first of a
    pair."""
    for each in ast.walk(node):
        firsts: list[ast.expr | None] = list(each.keys) if isinstance(each, ast.Dict) else []
        if isinstance(each, ast.Tuple) and len(each.elts) == 2:
            firsts = [each.elts[0]]
        for first in firsts:
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value
