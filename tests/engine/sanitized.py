"""Do the kernel's steps stay within their tensors? In a process that has AddressSanitizer's library
preloaded: it ends at the first byte that is read or written beside one.

    python -m tests.engine.sanitized SOURCE MODEL…
"""

import sys
from pathlib import Path

from services.engine import compiler
from tests.engine.test_compiled import filled, load, logits_of

PAGE_TOKENS = (4, 16, 64)


def main(source: str, *models: str) -> None:
    compiler.SOURCE = Path(source)  # type: ignore[misc]
    compiler.FLAGS = (*compiler.FLAGS, "-fsanitize=address", "-g")  # type: ignore[misc, assignment]
    for model in models:
        for page_tokens in PAGE_TOKENS:
            engine = load(Path(model), page_tokens=page_tokens)
            if engine.compiled is None:
                sys.exit("it was not compiled")
            rows = filled(engine)
            logits_of(engine, rows)
            for row in rows:
                logits_of(engine, [row])


if __name__ == "__main__":
    main(*sys.argv[1:])
