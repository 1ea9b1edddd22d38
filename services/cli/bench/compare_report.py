"""How is a comparison told to readers? Tables in Markdown, the same with bars in HTML, numbers in JSON."""

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from baton.cli.bench.charts import chart
from baton.cli.bench.comparison import Comparison

Rows = list[list[str]]
LEVEL: Final = ("load", "at a time")
NONE: Final = "–"

STYLE: Final = (
    "body{font-family:sans-serif;margin:2em}table{border-collapse:collapse}"
    "td,th{border:1px solid #bbb;padding:.25em .6em;text-align:left}"
)


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    try:
        baton = version("baton-serve")
    except PackageNotFoundError:
        baton = "from a source tree"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "baton": baton,
        "load_before": round(os.getloadavg()[0], 2),
    }


def write_report(folder: Path, name: str, comparison: Comparison, told: dict[str, Any]) -> list[Path]:
    """`told`: what the JSON file has. Returns the files."""
    names = [each.name for each in comparison.systems]
    picture = chart(names, comparison.measures, told["levels"])
    paths = [folder / f"compare-{name}.{suffix}" for suffix in ("json", "md", "svg", "html")]
    texts = (
        json.dumps(told, indent=1) + "\n",
        _markdown(name, comparison, told),
        picture,
        _html(name, comparison, told, picture),
    )
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, "utf-8")
    return paths


def _heading(name: str) -> str:
    return f"Comparison: {name}"


def _sentences(comparison: Comparison, told: dict[str, Any]) -> list[str]:
    on = told["machine"]
    how = (
        "In each round every system has its turn while the others are stopped, another one first each time. "
        f"Medians over the rounds; ratios are {comparison.systems[0].name}'s by the other's, in brackets the "
        "least and the greatest of single rounds. ITL is between chunks of one stream. Answered, refused "
        "(429 or 503) and failed are of all rounds."
    )
    where = (
        f"Measured {on['date']} on {on['cores']} cores, {on['processor']}; load average before: "
        f"{on['load_before']}. The client ran on the same cores."
    )
    return [
        *(f"{each.sentence()}." for each in comparison.loads),
        how,
        where,
        *(f"{each.name}: {each.about}" for each in comparison.systems if each.about),
    ]


def _place(level: dict[str, Any]) -> list[str]:
    return [level["load"], str(level.get("concurrency", NONE))]


def _figures(comparison: Comparison, told: dict[str, Any]) -> tuple[list[str], Rows]:
    head = [*LEVEL, "system", *(f"{each.title} ({each.unit})" for each in comparison.measures)]
    head += ["answered", "refused", "failed", "tokens a chunk", "client's CPU"]
    rows: Rows = []
    for level in told["levels"]:
        for each in comparison.systems:
            medians = level["medians"][each.name]
            values = [measure.of(medians) for measure in comparison.measures]
            figures = [NONE if value is None else f"{value:.4g}" for value in values]
            counted = [str(count) for count in level["counted"][each.name].values()]
            chunks = medians.get("chunks")
            tokens = f"{medians['output_tokens'] / chunks:.2f}" if chunks else NONE
            client = f"{medians['client_cpu_share']:.1%}"
            rows.append([*_place(level), each.name, *figures, *counted, tokens, client])
    return head, rows


def _ratios(comparison: Comparison, told: dict[str, Any]) -> tuple[list[str], Rows]:
    head = [*LEVEL, "against", *(each.title for each in comparison.measures)]
    rows: Rows = []
    for level in told["levels"]:
        for name, ratios in level["ratios"].items():
            cells = []
            for measure in comparison.measures:
                each = ratios[measure.path]
                text = f"{each['ratio']:.2f} ({each['least']:.2f}–{each['greatest']:.2f})" if each else NONE
                cells.append(text)
            rows.append([*_place(level), name, *cells])
    return head, rows


def _wishes(comparison: Comparison, told: dict[str, Any]) -> tuple[list[str], Rows]:
    titles = {each.path: each.title for each in comparison.measures}
    rows = [
        [
            each["against"],
            *_place(each),
            titles[each["measure"]],
            f"≤ {each['at_most']}" if "at_most" in each else f"≥ {each['at_least']}",
            NONE if each["ratio"] is None else f"{each['ratio']:.2f}",
            "yes" if each["met"] else "no",
        ]
        for each in told["wanted"]
    ]
    return ["against", *LEVEL, "measure", "wanted", "ratio", "met"], rows


def _tables(comparison: Comparison, told: dict[str, Any]) -> list[tuple[str, list[str], Rows]]:
    first = comparison.systems[0].name
    tables = [
        ("Medians", *_figures(comparison, told)),
        (f"{first}, as a multiple of each other system", *_ratios(comparison, told)),
    ]
    if told["wanted"]:
        tables.append(("What was wanted", *_wishes(comparison, told)))
    return tables


def _markdown(name: str, comparison: Comparison, told: dict[str, Any]) -> str:
    parts = [f"# {_heading(name)}", *_sentences(comparison, told), f"![bars](compare-{name}.svg)"]
    for title, head, rows in _tables(comparison, told):
        lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
        parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _html(name: str, comparison: Comparison, told: dict[str, Any], picture: str) -> str:
    def table(head: Sequence[str], rows: Rows) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        return "<table>" + line(head, "th") + "".join(line(row, "td") for row in rows) + "</table>"

    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(_heading(name))}</title>',
        f"<style>{STYLE}</style>",
        f"<h1>{escape(_heading(name))}</h1>",
        *(f"<p>{escape(each)}</p>" for each in _sentences(comparison, told)),
        picture,
    ]
    for title, head, rows in _tables(comparison, told):
        parts += [f"<h2>{escape(title)}</h2>", table(head, rows)]
    return "\n".join((*parts, "</html>", ""))
