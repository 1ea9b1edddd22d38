"""Small programs that stand in for the parts of a stack, as real processes."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from baton.launch.child import Child, start_child
from baton.launch.level_filter import LevelFilter
from baton.launch.restart_backoff import Backoff
from baton.launch.stack_plan import StackCommand
from baton.launch.supervisor import Supervisor
from baton.runtime.clock import SystemClock

PATIENCE_S = 30.0
"""Time-out far beyond every wait here, seconds. Reaching it means that the event never comes."""

# Writes `NAME up`, then `NAME asked` and `NAME ended` around a SIGTERM into the journal, and `NAME talked`
# once all that it says is read.
PART = """
import os, signal, sys, time
name, journal, behaviour = sys.argv[1:4]
def write(word):
    with open(journal, "a") as file: file.write(f"{name} {word}\\n")
def asked(*_):
    write("asked")
    if behaviour == "slow": time.sleep(0.3)
    write("ended")
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "deaf" else asked)
with open(f"{journal}.digests", "a") as file:
    file.write(f"{name} {os.environ.get('BATON_EXIT_DIGEST', 'none')}\\n")
write("up")
if behaviour == "refuses":
    sys.exit("baton: error: too little memory: lower --kv-cache-memory")
if behaviour == "crashes":
    raise ZeroDivisionError("a bug at start")
if behaviour == "talks":
    for _ in range(100): print("2026-01-31T12:00:00.000Z WARNING part talks " + 4000 * "x", flush=True)
    write("talked")
while True: time.sleep(60)
"""


async def eventually(true: Callable[[], bool]) -> None:
    """Wait until `true` returns True."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    """Return whether the process has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


class Parts:
    """Parts of a stack, by behaviour, with a record of their fates."""

    def __init__(self, journal: Path) -> None:
        self.behaviour: dict[str, str] = {}
        """Behaviour by name: refuses, crashes, talks (more than a pipe holds), slow (to stop), deaf (to
        SIGTERM). Other parts just run.
        """
        self.shown: list[str] = []
        self.children: list[Child] = []
        self.reported: list[tuple[str, int]] = []
        """Reported exits: name and process id."""
        self.secrets: list[bytes] = []
        """Secret of each report."""
        self.report_error: Exception | None = None
        self.journal_file = journal

    @property
    def journal(self) -> list[str]:
        return self.journal_file.read_text().splitlines() if self.journal_file.exists() else []

    def digests(self, name: str) -> list[str]:
        """Return the digest of the starter's secret that each start of a part got."""
        lines = Path(f"{self.journal_file}.digests").read_text().splitlines()
        return [line.split()[1] for line in lines if line.split()[0] == name]

    def command(self, name: str) -> Sequence[str]:
        return (sys.executable, "-c", PART, name, str(self.journal_file), self.behaviour.get(name, "runs"))

    async def start(self, part: StackCommand) -> Child:
        child = await start_child(
            part.name, self.command(part.name), dict(os.environ), LevelFilter("warning"), self.shown.append
        )
        child.exit_secret = part.name.encode()
        self.children.append(child)
        return child

    async def report_exit(self, name: str, pid: int, secret: bytes) -> None:
        self.reported.append((name, pid))
        self.secrets.append(secret)
        if self.report_error is not None:
            raise self.report_error

    def supervisor(self) -> Supervisor:
        quick = Backoff(first_ms=10, most_ms=20)
        return Supervisor(self.start, self.report_exit, self.shown.append, SystemClock(), lambda: quick)

    def up(self, *names: str) -> Callable[[], Awaitable[bool]]:
        """Return a function that returns whether all of `names` have come up."""

        async def all_up() -> bool:
            return all(f"{name} up" in self.journal for name in names)

        return all_up
