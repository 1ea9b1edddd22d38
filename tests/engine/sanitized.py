"""Do the kernel's steps stay within their tensors? In a process that has AddressSanitizer's library
preloaded: it ends at the first byte that is read or written beside one.

    python -m tests.engine.sanitized SOURCE BUILDS MODEL…
"""

import sys
from pathlib import Path

import torch

from services.engine import compiler
from tests.engine.emulated.build import emulated
from tests.engine.test_compiled import filled, load, logits_of, runnable

PAGE_TOKENS = (4, 16, 64)


def main(source: str, builds: str, *models: str) -> None:
    """`builds`: their places in `compiler.BUILDS`. Half of the models have weights that are numbers of
    bfloat16: in float32 a build is for these or for the others."""
    compiler.SOURCE = Path(source)  # type: ignore[misc]
    # With -O1 the same is read and written, and far sooner compiled.
    compiler.FLAGS = (*compiler.FLAGS, "-fsanitize=address", "-g", "-O1")  # type: ignore[misc, assignment]
    # What a CPU's own tiles read and write is not watched.
    for build in [
        emulated(each) if set(compiler.AMX) <= set(each.needs) else runnable(each)
        for each in (compiler.BUILDS[int(place)] for place in builds.split(","))
    ]:
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
