"""Do the kernel's steps stay within their tensors? In a process that has AddressSanitizer's library
preloaded: it ends at the first byte that is read or written beside one.

    python -m tests.engine.sanitized SOURCE BUILDS MODEL…
"""

import sys
from pathlib import Path

import torch

from services.engine import compiler
from tests.engine.kernels import KERNELS, filled, load, logits_of

PAGE_TOKENS = (4, 16, 64)


def main(source: str, builds: str, *models: str) -> None:
    """`builds`: their names in `KERNELS`, with semicolons between. Half of the models have weights that are
    numbers of bfloat16: in float32 a build is for these or for the others."""
    compiler.SOURCE = Path(source)  # type: ignore[misc]
    # With -O1 the same is read and written, and far sooner compiled.
    compiler.FLAGS = (*compiler.FLAGS, "-fsanitize=address", "-g", "-O1")  # type: ignore[misc, assignment]
    for build in (KERNELS[name] for name in builds.split(";")):
        compiler.BUILDS = (build,)  # type: ignore[misc]
        compiler.kernel.cache_clear()
        computed = sum(_compute(model, build, page_tokens) for model in models for page_tokens in PAGE_TOKENS)
        expected = len(PAGE_TOKENS) * len(models) // (1 if build.numbers is torch.bfloat16 else 2)
        if computed != expected:
            sys.exit(f"{computed} of {expected} were computed by {build}")


def _compute(model: str, build: compiler.Build, page_tokens: int) -> bool:
    """False where the model's weights are of other numbers than the build's."""
    engine = load(Path(model), dtype=build.numbers, page_tokens=page_tokens)
    if engine.compiled is None:
        return False
    rows = filled(engine)
    logits_of(engine, rows)
    for row in rows:
        logits_of(engine, [row])
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
