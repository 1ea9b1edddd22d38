"""A process that runs the compiled step under AddressSanitizer.

python -m tests.engine.execution.sanitized SOURCE CASES
"""

import json
import sys
from pathlib import Path

from baton.engine.execution import step_compiler
from baton.engine.execution.weight_memory import WeightMemory
from tests.engine.execution.compiled_kernels import KERNELS, coding_for, filled, load, logits_of
from tests.engine.executions import is_compiled


def main(source: str, cases: str) -> None:
    """Run steps for `cases`: JSON with a build's name in `KERNELS`, a model's directory, and tokens of a page
    each."""
    step_compiler.SOURCE = Path(source)  # type: ignore[misc]
    # With -O0 the same is read and written, and compiled in a sixth of the time.
    step_compiler.FLAGS = (*step_compiler.FLAGS, "-fsanitize=address", "-g", "-O0")  # type: ignore[misc, assignment]
    # Each has memory of its own: side by side a read past the end of one reads the next, and goes unseen.
    WeightMemory.put = lambda _, tensor: tensor.contiguous().clone()  # type: ignore[method-assign, assignment]
    for name, directory, page_tokens in json.loads(cases):
        build = KERNELS[name]
        step_compiler.BUILDS = (build,)  # type: ignore[misc]
        step_compiler.kernel.cache_clear()
        engine = load(
            Path(directory), dtype=build.numbers, page_tokens=page_tokens, quantization=coding_for(build)
        )
        if not is_compiled(engine):
            sys.exit(f"{name}: nothing of {directory} was compiled for pages of {page_tokens} tokens")
        rows = filled(engine)
        logits_of(engine, rows)
        for row in rows:
            logits_of(engine, [row])


if __name__ == "__main__":
    main(*sys.argv[1:])
