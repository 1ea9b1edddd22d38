"""Who begins without a tensor library, which takes seconds to import?"""

import subprocess
import sys

import pytest

HEAVY = frozenset({"torch", "transformers", "numpy", "nixl"})


@pytest.mark.parametrize(
    "modules",
    ["services.decode.batch, services.decode.turn, services.prefill.turn", "services.worker.stepper"],
    ids=["turns", "steps"],
)
def test_no_tensor_library_is_loaded_for(modules: str) -> None:
    script = f"import sys, {modules}; print(sorted({set(HEAVY)} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
