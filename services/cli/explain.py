"""Command `baton explain`, which shows the timeline of one request, with the cause of a failure first."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from baton.bootstrap.timeline.timeline_schema import LineKind, State
from baton.cli.admin import Bootstrap, BootstrapUnreadable, admin, workers_of

BAR: Final = 32
STATES: Final[Mapping[str, str]] = {
    State.ANSWERED: "bold green",
    State.FAILED: "bold red",
    State.REFUSED: "bold red",
    State.GONE: "bold",
}
KINDS: Final[Mapping[str, str]] = {
    LineKind.FAILURE: "bold red",
    LineKind.VOTE: "yellow",
    LineKind.EVIDENCE: "cyan",
    LineKind.SEAL: "cyan",
    LineKind.TOKEN: "green",
    LineKind.END: "bold",
    LineKind.NOTE: "dim",
}


def run_explain(request_id: str, at: Bootstrap, known: frozenset[str], *, as_json: bool) -> int:
    """Run `baton explain` for one request id. Return the exit code. Raises StartupError."""
    if not request_id.strip("."):  # no URL path can end so
        raise BootstrapUnreadable(f"no request has the id {request_id!r}")
    with admin(at, known) as pages:
        story = pages.read(f"requests/{quote(request_id, safe='')}")
        if as_json:
            print(json.dumps(story, ensure_ascii=False))
        else:
            Console(soft_wrap=False, highlight=False).print(Group(*pages.rendered(timeline_lines, story)))
    return 0


def timeline_lines(story: dict[str, Any]) -> Iterator[RenderableType]:
    state = story["state"]
    yield Text.assemble((story["request_id"], "bold"), "  ", (state, STATES.get(state, "bold blue")))
    yield Text(story["headline"], style="red" if state in (State.FAILED, State.REFUSED) else "")
    if story["cause"] is not None:
        tone = "blue" if state == State.PAUSED else "red"
        yield Text.assemble((story["cause"]["reason"], tone), ": ", (story["cause"]["meaning"], "dim"))
    begun = datetime.fromtimestamp(story["begun_wall_ms"] / 1000, UTC)
    if story["bootstrap"]:
        yield Text(f"From the bootstrap {story['bootstrap']}.", style="dim")
    for sentence in story["unanswered"]:
        yield Text(sentence, style="yellow")
    yield Text(f"Begun {begun:%Y-%m-%d %H:%M:%S} UTC, times in milliseconds since then.", style="dim")
    if story["trace_id"]:
        yield Text(f"Trace {story['trace_id']}.", style="dim")
    if story["others"]:
        yield Text(f"Other requests of this id, by room: {', '.join(story['others'])}.", style="dim")
    for number, attempt in enumerate(story["attempts"], start=1):
        yield from _attempt(story, number, attempt)
    roomless = [line for line in story["lines"] if not line["room"]]
    if roomless:
        yield Padding(_lines(roomless), (1, 0, 0, 0))


def _attempt(story: dict[str, Any], number: int, attempt: dict[str, Any]) -> Iterator[RenderableType]:
    several = f"Room {number} of {len(story['attempts'])}" if len(story["attempts"]) > 1 else "Room"
    cause = attempt["cause"]
    ended = attempt["phase"] if cause is None else f"{cause['reason']}: {cause['text']}"
    yield Text.assemble(
        f"\n{several} ",
        (attempt["room"], "bold"),
        f" on {workers_of(attempt, ' and ')}, {ended}",
    )
    stages = [stage for stage in story["stages"] if stage["room"] == attempt["room"]]
    if stages:
        yield Padding(_stages(stages), (1, 0, 0, 2))
    yield Padding(_lines([line for line in story["lines"] if line["room"] == attempt["room"]]), (1, 0, 0, 2))
    if attempt["events_dropped"]:
        yield Text(f"  {attempt['events_dropped']} more lines were not kept.", style="dim")


def _stages(stages: list[dict[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    most = max(stage["ms"] for stage in stages) or 1.0
    for stage in stages:
        bar = "█" * round(BAR * stage["ms"] / most) or "▏"
        table.add_row(
            stage["text"],
            f"{stage['ms']:,.1f} ms",
            Text(bar, style="blue" if stage["first_token"] else "dim"),
        )
    return table


def _lines(lines: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("after ms", justify="right", no_wrap=True)
    table.add_column("process", no_wrap=True)
    table.add_column("event", no_wrap=True)
    table.add_column("")
    for line in lines:
        style = KINDS.get(line["kind"], "")
        table.add_row(
            f"{line['at_ms']:,.1f}", Text(line["lane"]), Text(line["name"], style=style), Text(line["detail"])
        )
    return table
