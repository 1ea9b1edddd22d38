"""Tests that no code of ours unpickles or evaluates anything from a peer (`no-pickle`)."""

import ast
from collections.abc import Iterator
from importlib.abc import InspectLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

SERVICES: Final = Path(__file__).parents[2] / "services"
MODULES: Final = frozenset(
    {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle"}
)
CALLS: Final = frozenset(
    {
        "eval",
        "exec",
        "compile",
        "__import__",
        # nixl's own, which pickle
        "deserialize_descs",
        "get_serialized_descs",
        # torch's, which pickle what they send
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
    }
)
LOADERS: Final = frozenset(
    {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load"), ("yaml", "load")}
)
HARMLESS: Final = frozenset({("re", "compile"), ("torch", "compile")})


def faults(source: str) -> Iterator[str]:
    """Yield each construct in `source` that could execute a peer's bytes, with its line."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        names: list[str] = []
        match node:
            case ast.Import(names=aliases):
                names = [alias.name.split(".")[0] for alias in aliases]
            case ast.ImportFrom(module=str(module), names=aliases):
                names = [module.split(".")[0], *(alias.name for alias in aliases)]
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield f"line {line}: {name}()"
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in LOADERS:
                yield f"line {line}: {owner}.{name}"
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in HARMLESS:
                pass
            case ast.Attribute(attr=name) if name in CALLS - {"eval", "compile"}:
                yield f"line {line}: .{name}"
        yield from (f"line {line}: import of {name}" for name in names if name in MODULES | CALLS)


def source(path: Path) -> str:
    """The text that an import of the file would run."""
    names = ("baton", *path.relative_to(SERVICES).with_suffix("").parts)
    module = ".".join(names).removesuffix(".__init__")
    spec = find_spec(module)
    assert spec is not None, module
    if not isinstance(spec.loader, InspectLoader):
        # pytest's own loader, for a file whose name it takes for a test's
        return path.read_text(encoding="utf-8")
    return spec.loader.get_source(module) or ""


def test_no_module_of_ours_can_unpickle() -> None:
    files = sorted(SERVICES.rglob("*.py"))
    assert len(files) > 100
    found = [f"{path.relative_to(SERVICES)} {fault}" for path in files for fault in faults(source(path))]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal",
        "from pickle import loads",
        "from torch.distributed import broadcast_object_list",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "agent.deserialize_descs(sent)",
        "torch.load(path)",
        "eval(text)",
        "def read(sent):\n    import dill\n    return dill.loads(sent)",
    ],
)
def test_what_could_is_seen(source: str) -> None:
    assert list(faults(source))


@pytest.mark.parametrize("source", ["re.compile('x')", "model.eval()", "torch.compile(f)", "json.loads(x)"])
def test_what_could_not_is_left(source: str) -> None:
    assert not list(faults(source))
