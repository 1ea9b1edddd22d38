"""What is the stack doing right now, in a terminal: workers, queues, pages, rooms, the newest requests?"""

import json
import time
from collections.abc import Iterator
from typing import Any, Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.cli.admin import Admin, NotTold, admin
from services.rooms.counts import counted

EVERY_S: Final = 1.0
REQUESTS_SHOWN: Final = 15
PAGES_BAR: Final = 20
PAGES: Final = (
    ("committed", "green"),
    ("exposed", "cyan"),
    ("reserved", "yellow"),
    ("quarantined", "red"),
    ("cached", "blue"),
    ("free", "bright_black"),
)
STATES: Final = {
    "ready": "green",
    "joining": "blue",
    "draining": "yellow",
    "suspect": "yellow",
    "answered": "green",
    "failed": "red",
    "refused": "red",
    "retrying": "yellow",
    "gone": "dim",
}


def run_top(url: str | None, known: frozenset[str], *, once: bool, as_json: bool) -> int:
    """`baton top`. Returns the exit code. Raises StartupError."""
    with admin(url, known) as pages:
        live = pages.read("live")
        if as_json:
            print(json.dumps(live, ensure_ascii=False))
        elif once:
            Console(highlight=False).print(Group(*told(live)))
        else:
            _follow(pages, live)
    return 0


def _follow(pages: Admin, live: dict[str, Any]) -> None:
    """Until the reader has had enough. A bootstrap that is being restarted is waited for."""
    console = Console(highlight=False)
    with Live(Group(*told(live)), console=console, screen=console.is_terminal, auto_refresh=False) as screen:
        try:
            while True:
                time.sleep(EVERY_S)
                try:
                    live = pages.read("live")
                    said: RenderableType = Text("Ctrl-C ends.", style="dim")
                except NotTold as error:
                    said = Text(str(error), style="bold red")
                screen.update(Group(*told(live), said), refresh=True)
        except KeyboardInterrupt:
            return


def told(live: dict[str, Any]) -> Iterator[RenderableType]:
    rooms = ", ".join(f"{count} {phase}" for phase, count in live["rooms"].items())
    yield Text.assemble(
        ("Baton  ", "bold"),
        f"rooms: {rooms}; ",
        (f"{live['queued']} waiting for workers", "yellow" if live["queued"] else ""),
        f"; {live['kept']} kept",
    )
    yield _workers(live["workers"])
    for lost in live["lost"][:3]:
        when = time.strftime("%H:%M:%S", time.localtime(lost["wall_ms"] / 1000))
        yield Text(
            f"gone at {when}: {lost['name']}, {lost['why']}, {counted(lost['rooms'], 'room')}", style="red"
        )
    yield _requests(live["requests"][:REQUESTS_SHOWN])
    failed = [each for each in live["failed"] if each["state"] in ("failed", "refused")]
    if failed:
        yield Text("Failed lately", style="bold red")
        yield _requests(failed)


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for name in ("worker", "state", "rooms", "queues", "KV pages", "", "tokens/s"):
        table.add_column(name, justify="right" if name in ("rooms", "tokens/s") else "left")
    for worker in workers:
        queues = "  ".join(f"{name} {count}" for name, count in worker["queues"].items())
        table.add_row(
            Text(worker["name"], style="bold"),
            Text(worker["state"], style=STATES.get(worker["state"], "")),
            f"{worker['rooms']}/{worker['rooms_max']}",
            Text(queues or "not told yet"),
            _bar(worker["pages"]),
            _counts(worker["pages"]),
            f"{worker['tokens_s']:,.0f}",
        )
    return table


def _bar(pages: dict[str, int]) -> Text:
    whole = sum(pages.values())
    bar = Text()
    for state, style in PAGES:
        count = pages.get(state, 0)
        bar.append("█" * (max(round(PAGES_BAR * count / whole), 1) if count else 0), style=style)
    bar.truncate(PAGES_BAR)
    return bar


def _counts(pages: dict[str, int]) -> Text:
    counts = [(f"{pages[state]:,} {state}", style) for state, style in PAGES if pages.get(state)]
    return Text("  ").join(Text(text, style=style) for text, style in counts)


def _requests(requests: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("time", no_wrap=True)
    table.add_column("request", no_wrap=True, overflow="ellipsis", max_width=40)
    table.add_column("state", no_wrap=True)
    table.add_column("first token", justify="right", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    table.add_column("where")
    for each in requests:
        where = f"{each['prefill']} → {each['decode']}" if each["prefill"] else ""
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(each["begun_wall_ms"] / 1000)),
            Text(each["request_id"]),
            Text(each["state"], style=STATES.get(each["state"], "blue")),
            "" if each["first_token_ms"] is None else f"{each['first_token_ms']:,} ms",
            f"{each['total_ms']:,} ms",
            Text(
                where if not each["cause"] else f"{where}  {each['cause']}",
                style="red" if each["cause"] else "",
            ),
        )
    return table
