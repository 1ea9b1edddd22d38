"""Command `baton top`, which shows workers, queues, pages, rooms and the newest requests of a stack."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton.bootstrap.timeline.timeline_schema import State
from baton.cli.admin import Admin, Bootstrap, BootstrapUnreadable, admin, workers_of
from baton.cli.keyboard import Keyboard
from baton.fleet.room_entry import RoomPhase
from baton.fleet.worker_record import WorkerState
from baton.pages.pool import PageState
from baton.rooms.phases import Side
from baton.rooms.plurals import counted
from baton.rooms.queues import RoomQueue

EVERY_S: Final = 1.0
WIDE: Final = 110
"""Smallest terminal width, in columns, at which all details are shown. A narrower one gets counts instead of
lists."""
ENDS: Final = Text("q or Ctrl-C ends.", style="dim")
REQUESTS_SHOWN: Final = 15
PAGES_BAR: Final = 20
PAGES: Final = {
    PageState.COMMITTED.value: "green",
    PageState.EXPOSED.value: "cyan",
    PageState.RESERVED.value: "yellow",
    PageState.QUARANTINED.value: "red",
    PageState.CACHED.value: "blue",
    PageState.FREE.value: "bright_black",
}
STATES: Final[Mapping[str, str]] = {
    WorkerState.READY: "green",
    WorkerState.JOINING: "blue",
    WorkerState.DRAINING: "yellow",
    WorkerState.SUSPECT: "yellow",
    State.ANSWERED: "green",
    State.FAILED: "red",
    State.REFUSED: "red",
    State.RETRYING: "yellow",
    State.PAUSED: "blue",
    State.GONE: "dim",
}


def run_top(at: Bootstrap, known: frozenset[str], *, once: bool, as_json: bool) -> int:
    """Run `baton top`. Return the exit code. Raises StartupError."""
    with admin(at, known) as pages:
        live = pages.read("live")
        if as_json:
            print(json.dumps(live, ensure_ascii=False))
        elif once:
            Console(highlight=False).print(Group(*pages.rendered(stack_lines, live)))
        else:
            _follow(pages, live)
    return 0


def _follow(pages: Admin, live: dict[str, Any]) -> None:
    """Redraw the screen each second until the user ends it. If the bootstrap is restarting, wait for it."""
    console = Console(highlight=False)
    first = Group(*pages.rendered(stack_lines, live), ENDS)
    with (
        Keyboard() as keyboard,
        Live(first, console=console, screen=console.is_terminal, auto_refresh=False) as screen,
    ):
        try:
            while keyboard.wait(EVERY_S) != "q":
                message: RenderableType = ENDS
                try:
                    live = pages.read("live")
                except BootstrapUnreadable as error:
                    message = Text(str(error), style="bold red")
                screen.update(Group(*stack_lines(live), message), refresh=True)
        except KeyboardInterrupt:
            return


class Fitted:
    """A part of the screen that has a wide and a narrow form, chosen by the terminal's width."""

    def __init__(self, draw: Callable[[bool], RenderableType]) -> None:
        """Make the part. `draw`: function that draws it, given whether the terminal is wide."""
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._draw(options.max_width >= WIDE)


def stack_lines(live: dict[str, Any]) -> Iterator[RenderableType]:
    rooms = ", ".join(f"{count} {phase}" for phase, count in live["rooms"].items())
    yield Text.assemble(
        ("Baton  ", "bold"),
        f"rooms: {rooms}; ",
        (f"{live['queued']} waiting for workers", "yellow" if live["queued"] else ""),
        f"; {live['kept']} kept",
    )
    if len(live["bootstraps"]) > 1:
        yield _bootstraps(live["bootstraps"])
    for sentence in live["unanswered"]:
        yield Text(sentence, style="yellow")
    yield _workers(live["workers"])
    for lost in live["lost"][:3]:
        when = time.strftime("%H:%M:%S", time.localtime(lost["wall_ms"] / 1000))
        yield Text(
            f"gone at {when}: {lost['name']}, {lost['why']}, {counted(lost['rooms'], 'room')}", style="red"
        )
    yield _requests(live["requests"][:REQUESTS_SHOWN])
    failed = [each for each in live["failed"] if each["state"] in (State.FAILED, State.REFUSED)]
    if failed:
        yield Text("Failed lately", style="bold red")
        yield _requests(failed)


def _bootstraps(bootstraps: list[dict[str, Any]]) -> Table:
    """Return the table of what each bootstrap has of its own. The first one is that which answers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("bootstrap", no_wrap=True)
    for name in ("queued", "running", "prefill ready", "decode ready"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in bootstraps:
        running = sum(each["rooms"][phase.value] for phase in (RoomPhase.OPEN, RoomPhase.STREAMING))
        counts = (each["queued"], running, *(each["ready"][side.value] for side in Side))
        table.add_row(Text(each["address"], style="bold"), *(f"{count:,}" for count in counts))
    return table


def _workers(workers: list[dict[str, Any]]) -> RenderableType:
    return Fitted(lambda wide: _all_of_workers(workers) if wide else _counts_of_workers(workers))


def _all_of_workers(workers: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for name in ("worker", "state", "rooms", "queues", "KV pages", "", "tokens/s"):
        table.add_column(name, justify="right" if name in ("rooms", "tokens/s") else "left")
    for worker in workers:
        queues = "  ".join(f"{name} {count}" for name, count in worker["queues"].items())
        table.add_row(
            _name(worker),
            _state(worker),
            f"{worker['rooms']}/{worker['rooms_max']}",
            Text(queues or "not told yet"),
            _bar(worker["pages"], PAGES_BAR),
            _counts(worker["pages"]),
            f"{worker['tokens_s']:,.0f}",
        )
    return table


def _counts_of_workers(workers: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("worker", no_wrap=True, overflow="ellipsis", max_width=22)
    table.add_column("state", no_wrap=True)
    for name in ("rooms", "queued"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("KV pages", no_wrap=True)
    for name in ("free", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in workers:
        queued = sum(count for name, count in worker["queues"].items() if name != RoomQueue.RUNNING)
        table.add_row(
            _name(worker),
            _state(worker),
            f"{worker['rooms']}/{worker['rooms_max']}",
            f"{queued:,}",
            _bar(worker["pages"], PAGES_BAR // 2),
            f"{worker['pages'].get(PageState.FREE.value, 0):,}",
            f"{worker['tokens_s']:,.0f}",
        )
    return table


def _name(worker: dict[str, Any]) -> Text:
    """Return a worker's name as text. If its process serves both sides, this side's share of its time is
    added."""
    weight = worker.get("weight")
    share = "" if weight is None else f" {weight}%"
    return Text(worker["name"], style="bold").append(share, style="not bold dim")


def _state(what: dict[str, Any], other: str = "") -> Text:
    return Text(what["state"], style=STATES.get(what["state"], other))


def _bar(pages: dict[str, int], length: int) -> Text:
    whole = sum(pages.values())
    bar = Text()
    for state, style in PAGES.items():
        count = pages.get(state, 0)
        bar.append("█" * (max(round(length * count / whole), 1) if count else 0), style=style)
    bar.truncate(length)
    return bar


def _counts(pages: dict[str, int]) -> Text:
    counts = [(f"{pages[state]:,} {state}", style) for state, style in PAGES.items() if pages.get(state)]
    return Text("  ").join(Text(text, style=style) for text, style in counts)


def _requests(requests: list[dict[str, Any]]) -> RenderableType:
    return Fitted(lambda wide: _table_of_requests(requests, wide=wide))


def _table_of_requests(requests: list[dict[str, Any]], *, wide: bool) -> Table:
    """Return the table of requests. A narrow table shows why a request failed instead of where it ran."""
    padding = (0, 1) if wide else (0, 1, 0, 0)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, header_style="dim")
    table.add_column("time", no_wrap=True)
    table.add_column("request", no_wrap=True, overflow="ellipsis", max_width=40 if wide else 18)
    table.add_column("state", no_wrap=True)
    table.add_column("first token" if wide else "first", justify="right", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    table.add_column("where" if wide else "cause", no_wrap=not wide, overflow="ellipsis")
    for each in requests:
        where = f"{workers_of(each, ' → ')}  " if wide and each["decode"] else ""
        where += f"at {each['bootstrap']}  " if wide and each["bootstrap"] else ""
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(each["begun_wall_ms"] / 1000)),
            Text(each["request_id"]),
            _state(each, "blue"),
            "" if each["first_token_ms"] is None else f"{each['first_token_ms']:,} ms",
            f"{each['total_ms']:,} ms",
            Text(f"{where}{each['cause'] or ''}".rstrip(), style="red" if each["cause"] else ""),
        )
    return table
