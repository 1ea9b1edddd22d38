"""The text of docs/settings.md, made from the settings classes."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any, Final

from baton.launch.serve_settings import SERVICES, ServeSettings, not_taken
from baton.runtime.environment_check import FAMILIES, Family
from baton.runtime.setting_kinds import (
    ADDRESS,
    CPUS,
    DURATION_MS,
    FILE,
    HOST,
    PORT,
    SIZE,
    TEXT,
    SettingKind,
)
from baton.runtime.settings import Setting, settings_of

HEAD: Final = """\
# Settings

Made from the settings classes; a test compares the two. Each is a flag and a variable: a flag wins
over its variable, which wins over the default, and a misspelt name is an error, as is a value that
is not allowed. `baton bootstrap --help`, and that of `prefill`, `decode`, `worker` and `serve`, say
the same. The Helm chart has them under `bootstrap.settings`, `prefill.settings` and
`decode.settings`, but for those that follow from other values ([deploy.md](deploy.md)).
"""

LEGEND: Final[Mapping[str, SettingKind[Any]]] = {
    "SIZE": SIZE,
    "TIME": DURATION_MS,
    "HOST": HOST,
    "HOST:PORT": ADDRESS,
    "PORT": PORT,
    "CPUS": CPUS,
    "FILE": FILE,
    "TEXT": TEXT,
}
"""Kinds of values that the page explains once."""

TITLES: Final[Mapping[tuple[str, ...], str]] = {
    ("bootstrap", "prefill", "decode", "worker"): "All services",
    ("prefill", "decode", "worker"): "Workers: prefill, decode and both",
    ("bootstrap",): "Bootstrap",
    ("prefill", "worker"): "Prefill",
    ("prefill",): "Prefill",
    ("decode", "worker"): "Decode",
    ("worker",): "Workers of both sides",
}
"""Headings by the services that read a setting. A worker of both sides reads those of either."""

SERVE: Final = """\
It has the settings below, and passes those of the services above on to its parts. It chooses some
for each part itself, or leaves them at their defaults:

{rest}
"""

OTHERS: Final = """\
The libraries read variables of their own. Baton decides about each before the first of them is
loaded. The first line with the name counts; `*` stands for any ending. `dropped`: removed, with a
message; `set`, `default`: as the line says; `ignored`: nothing of Baton reads it; `honoured`: as
its library says.
"""

COLUMNS: Final = "| flag | variable | default | values | meaning |\n|---|---|---|---|---|"


def settings_page() -> str:
    """Return the page in Markdown. Raises KeyError for a setting of an unknown set of services."""
    readers: dict[Setting, tuple[str, ...]] = {}
    for cls in SERVICES:
        for each in settings_of(cls):
            readers[each] = (*readers.get(each, ()), cls.role)
    found: dict[str, list[Setting]] = {title: [] for title in TITLES.values()}
    for each, roles in readers.items():
        found[TITLES[roles]].append(each)
    rest = fill(", ".join(f"`{each.flag}`" for each in not_taken()), 100, break_on_hyphens=False)
    return "\n".join(
        [
            HEAD,
            "".join(f"* `{name}`: {kind.allowed}\n" for name, kind in LEGEND.items()),
            *(f"## {title}\n\n{_table(group)}\n" for title, group in found.items()),
            f"## `baton serve`\n\n{SERVE.format(rest=rest)}\n{_table(settings_of(ServeSettings))}\n",
            f"## Variables of others\n\n{OTHERS}\n{_others()}\n",
        ]
    )


def _table(settings: Sequence[Setting]) -> str:
    return "\n".join([COLUMNS, *map(_row, settings)])


def _others() -> str:
    rows = (
        f"| {' '.join(f'`{name}`' for name in each.names)} | {_verdict(each)} | {each.why} |"
        for each in FAMILIES
    )
    return "\n".join(["| variables | what becomes of them | why |", "|---|---|---|", *rows])


def _verdict(family: Family) -> str:
    return f"{family.verdict.value}: `{family.value}`" if family.value else family.verdict.value


def _row(each: Setting) -> str:
    cells = (
        "" if each.secret else f"`{each.flag}`",
        f"`{each.variable}`",
        f"`{each.default_text}`" if each.default_text and not each.secret else "",
        f"`{each.kind.metavar}`" if each.kind.metavar in LEGEND else each.kind.allowed,
        each.help,
    )
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
