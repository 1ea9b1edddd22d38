"""A check that a generated section of the docs matches the code that it is generated from."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[2] / "docs" / "observability.md"


def generated(name: str, lines: Sequence[str], *, rewrite: bool) -> None:
    """Check that the page's section of that name has these lines. `rewrite`: write them there instead."""
    section = re.compile(rf"(<!-- made of the code: {name} -->\n)(.*?)(<!-- /made -->)", re.DOTALL)
    text = PAGE.read_text(encoding="utf-8")
    [found] = section.findall(text)
    made = "\n".join(lines) + "\n"
    if rewrite:
        PAGE.write_text(section.sub(lambda old: f"{old[1]}{made}{old[3]}", text), encoding="utf-8")
    else:
        assert found[1] == made, f"run pytest tests/rooms -k page --rewrite: {name}"
