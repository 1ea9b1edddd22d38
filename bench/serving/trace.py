"""Recorded traces of requests, as the JSON lines that aiperf replays."""

import csv
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

AZURE: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Columns of Azure's CSV files."""

Row = dict[str, Any]


def read_trace(path: Path) -> Iterator[Row]:
    """Yield requests of a Mooncake or Azure trace in Mooncake's form, times in milliseconds.

    Raises ValueError for a file in neither form, and OSError.
    """
    with path.open(encoding="utf-8", newline="") as lines:
        if path.suffix == ".jsonl":
            yield from map(json.loads, lines)
            return
        table = csv.DictReader(lines)
        if not set(AZURE) <= set(table.fieldnames or ()):
            raise ValueError(f"{path}: it has no columns {', '.join(AZURE)}")
        first: datetime | None = None
        for row in table:
            at = datetime.fromisoformat(row[AZURE[0]][:26])  # Azure has seven decimals
            first = first or at
            yield {
                "timestamp": round((at - first).total_seconds() * 1000),
                "input_length": int(row[AZURE[1]]),
                "output_length": int(row[AZURE[2]]),
            }


def scale(row: Row, length_scale: float, tokens_max: int | None) -> Row:
    """Return the request with its lengths multiplied, at least 1 each.

    A request of more than `tokens_max` tokens loses the end of its answer, down to half of that, and then
    the end of its prompt. Hashes of prefixes no longer fit scaled lengths, so they are left out.
    """
    prompt = max(1, round(row["input_length"] * length_scale))
    output = max(1, round(row["output_length"] * length_scale))
    if tokens_max is not None and prompt + output > tokens_max:
        output = min(output, tokens_max // 2)
        prompt = min(prompt, tokens_max - output)
    scaled = row | {"input_length": prompt, "output_length": output}
    if (prompt, output) != (row["input_length"], row["output_length"]):
        scaled.pop("hash_ids", None)
    return scaled


def convert(path: Path, requests: int | None, length_scale: float, tokens_max: int | None) -> str:
    """Return the first `requests` of a trace, scaled, as JSON lines."""
    rows = [row for index, row in enumerate(read_trace(path)) if requests is None or index < requests]
    return "".join(f"{json.dumps(scale(row, length_scale, tokens_max))}\n" for row in rows)


def trace(
    file: Annotated[Path, typer.Argument(help="Mooncake's JSON lines, or Azure's CSV.")],
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first ones.")] = None,
    length_scale: Annotated[float, typer.Option(min=0, help="Factor of all lengths.")] = 1,
    tokens_max: Annotated[int | None, typer.Option(min=2, help="Longest prompt with its answer.")] = None,
) -> None:
    """Print a trace as JSON lines that aiperf replays (docs/benchmarks)."""
    try:
        print(convert(file, requests, length_scale, tokens_max), end="")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
