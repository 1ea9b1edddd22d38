"""Private names of libraries: each is used in one file, and is still there in what is installed.

A library may rename a private name in any release. A test fails by that name before a user's request does.
"""

import ast
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import nixl
import pytest
import torch
import uvloop
from transformers import PreTrainedConfig, PreTrainedModel, conversion_mapping
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import chat_template_utils
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SERVICES: Final = Path(__file__).parents[2] / "services"
GENERATED: Final = SERVICES / "wire" / "baton"
gloo: Final[Any] = torch.distributed.ProcessGroupGloo


def gloo_options() -> object:
    return gloo._Options()


PRIVATE: Final[dict[str, tuple[str, Callable[[], object]]]] = {
    "_C": ("engine/execution/linear_layers.py", lambda: torch),
    "_Options": ("runtime/gloo_connections.py", lambda: gloo),
    "_api": ("transfer/nixl_library.py", lambda: nixl),
    "_attn_implementation": ("engine/loading/library_model.py", PreTrainedConfig),
    "_bindings": ("transfer/nixl_library.py", lambda: nixl),
    "_checkpoint_conversion_mapping_cache": (
        "engine/loading/single_experts.py",
        lambda: conversion_mapping,
    ),
    "_compile_jinja_template": ("api/text/chat_template.py", lambda: chat_template_utils),
    "_devices": ("runtime/gloo_connections.py", gloo_options),
    "_get_backend_id": ("worker/pending_events.py", lambda: uvloop.Loop),
    "_get_dtype_plan": ("engine/loading/weight_files.py", lambda: PreTrainedModel),
    "_global_mapping": (
        "engine/loading/capability_probes.py",
        lambda: AttentionMaskInterface,
    ),
    "_has_mkldnn": ("engine/execution/linear_layers.py", lambda: torch._C),
    "_is_in_bad_fork": ("launch/fork_server.py", lambda: torch.cuda),
    "_is_mkldnn_bf16_supported": ("engine/execution/linear_layers.py", lambda: torch.ops.mkldnn),
    "_keys_to_ignore_on_load_missing": ("engine/loading/weight_files.py", lambda: PreTrainedModel),
    "_linear_pointwise": ("engine/execution/linear_layers.py", lambda: torch.ops.mkldnn),
    "_pp_plan": ("engine/loading/model_partition.py", lambda: PreTrainedModel),
    "_reorder_linear_weight": ("engine/execution/linear_layers.py", lambda: torch.ops.mkldnn),
    "_start_asgi_task": ("web/refusable_http.py", lambda: HttpToolsProtocol),
    "_timeout": ("runtime/gloo_connections.py", gloo_options),
    "_tp_plan": ("engine/loading/model_partition.py", lambda: PreTrainedModel),
    "_unset_keepalive_if_required": ("web/refusable_http.py", lambda: HttpToolsProtocol),
}
"""The file under `services` that uses each name, and the object of the library that has it."""
NOT_PRIVATE: Final = frozenset({"_asdict", "_exit", "_replace", "_is_expert_parallel"})
"""Documented names of the standard library, and one that this project sets and does not read."""


def used() -> dict[str, set[str]]:
    """Return the files that use each private name which no class or module of this project defines."""
    own: set[str] = set()
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(SERVICES.rglob("*.py")):
        if path.is_relative_to(GENERATED):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    own.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(attr=name):
                    found[name].add(str(path.relative_to(SERVICES)))
                case ast.ImportFrom(names=names):
                    for each in names:
                        found[each.name].add(str(path.relative_to(SERVICES)))
                case _:
                    pass
    private = {name for name in found if name.startswith("_") and not name.startswith("__")}
    return {name: found[name] for name in private - own - NOT_PRIVATE}


def test_each_private_name_of_a_library_is_used_in_one_file() -> None:
    found = used()
    assert sorted(found.keys() - PRIVATE.keys()) == []
    assert found == {name: {PRIVATE[name][0]} for name in found}


@pytest.mark.parametrize("name", sorted(PRIVATE))
def test_each_private_name_is_there_in_what_is_installed(name: str) -> None:
    _, holder = PRIVATE[name]
    assert hasattr(holder(), name), f"{name} is gone: mend services/{PRIVATE[name][0]}"
