"""Tests of which modules load without the tensor library, which takes seconds to import."""

import subprocess
import sys

import pytest

HEAVY = frozenset({"torch", "transformers", "numpy", "nixl"})
PURE = ("rooms", "pages", "model", "stories", "sim", "prefill", "decode", "mutants")
"""Folders of tests that have to start quickly."""


def loaded(script: str) -> str:
    """Return the heavy modules that a process has loaded after running `script`."""
    whole = f"{script}\nimport sys; print(sorted({set(HEAVY)} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", whole], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "modules",
    [
        "baton.decode.batch, baton.decode.decode_work, baton.prefill.prefill_work, baton.worker.step_thread",
        "baton.bootstrap.wiring",
        "tests.sim.__main__",
        "tests.model.__main__",
    ],
    ids=["turns", "bootstrap", "simulation", "model checker"],
)
def test_no_tensor_library_is_loaded_for(modules: str) -> None:
    assert loaded(f"import {modules}") == "[]"


def test_no_tensor_library_is_loaded_for_the_tests_of_what_is_pure() -> None:
    folders = [f"tests/{each}" for each in PURE]
    assert loaded(f"import pytest; assert not pytest.main(['-q', '--collect-only', *{folders}])") == "[]"
