"""The text of docs/behaviours.md, made from the table of behaviours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.api.behaviours.sending import Behaviour, Refused
from tests.api.behaviours.table import GROUPS, is_fault, is_right

PAGE: Final = Path(__file__).parents[3] / "docs" / "behaviours.md"
HEAD: Final = """# Compared with vLLM's and SGLang's own tests

What the test suites of vLLM (`tests/entrypoints`, `tests/tool_use`) and SGLang
(`test/registered/openai_server`) assert of a server that generates text, and what Baton does. They
were read in November 2026 and are described in our words. Each is a row of
`tests/api/behaviours`. `pytest tests/api/test_behaviours.py` sends all of them to the
application, with a model that generates the row's text. With `--rewrite` it writes this page.
Images, audio, adapters and other services generate no text: one row for each kind says how it is
refused.

* **right**: the answer is what the peer's test asserts. Or the request is invalid for both, and the
  error names its field.
* **refused by name**: the peer serves it. Here it is a 400 that names the field, or a 404 of a
  route, and nothing is computed.
* **wrong**: neither. The test fails on each.
"""


def rendered() -> str:
    rows = [row for rows in GROUPS.values() for row in rows]
    lines = [
        HEAD,
        "| group | vLLM's | SGLang's | right | refused by name | wrong |",
        "|---|---|---|---|---|---|",
        *(_counted(name, rows) for name, rows in GROUPS.items()),
        _counted("**all**", rows),
        "",
        "## What is refused by name",
        "",
        "| behaviour | where its peer asserts it | names | why |",
        "|---|---|---|---|",
        *(_refused(row) for row in rows if not is_right(row)),
    ]
    for name, group in GROUPS.items():
        if served := [row for row in group if is_right(row)]:
            lines += [
                "",
                f"## {name[0].upper()}{name[1:]}",
                "",
                "| behaviour | where its peer asserts it | here |",
                "|---|---|---|",
            ]
            lines += [*map(_served, served)]
    return "\n".join(lines) + "\n"


def _counted(name: str, rows: Sequence[Behaviour]) -> str:
    peers = [sum(row.peer == peer for row in rows) for peer in ("vLLM", "SGLang")]
    right = sum(map(is_right, rows))
    return f"| {name} | {peers[0]} | {peers[1]} | {right} | {len(rows) - right} | 0 |"


def _claim(row: Behaviour) -> str:
    return f"{row.claim.replace('|', chr(92) + '|')} (`{row.path}`)"


def _refused(row: Behaviour) -> str:
    assert isinstance(row.expected, Refused)
    named = f"`{row.expected.param}`" if row.expected.param else f"the route, {row.expected.status}"
    return f"| {_claim(row)} | {row.source} | {named} | {row.expected.why} |"


def _served(row: Behaviour) -> str:
    if not is_fault(row):
        return f"| {_claim(row)} | {row.source} | as there |"
    assert isinstance(row.expected, Refused)
    named = f" `{row.expected.param}`" if row.expected.param else ""
    return f"| {_claim(row)} | {row.source} | {row.expected.status}{named} |"
