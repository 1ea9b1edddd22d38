"""Small programs that stand in for the ranks of a worker, as real processes."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.decode.settings import DecodeSettings
from baton.launch.rank_processes import RankProcesses
from baton.launch.restart_backoff import Backoff
from baton.runtime.clock import SystemClock
from baton.runtime.worker_settings import WorkerSettings
from tests.launch.stand_ins import eventually

# Writes `RANK up PID` and `RANK asked` into the journal, and `RANK talked` once much that it says is read.
# The leader answers /started, and all leave, or lose their group, when a file says so.
RANK = """
import http.server, os, pathlib, signal, sys, threading, time
rank, port, journal, behaviour = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]), sys.argv[4]
leave, lost = journal.with_name("leave"), journal.with_name("lost")
def write(word):
    with journal.open("a") as file: file.write(f"{rank} {word}\\n")
def asked(*_):
    write("asked")
    if behaviour != "deaf": leave.touch()
signal.signal(signal.SIGTERM, asked)
with open(f"{journal}.digests", "a") as file: file.write(os.environ.get("BATON_EXIT_DIGEST", "none") + "\\n")
write(f"up {os.getpid()}")
if behaviour == "refuses":
    sys.exit("baton: error: too little memory: lower --kv-cache-memory")
if behaviour == "crashes":
    raise ZeroDivisionError("a bug at start")
class Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/started" and behaviour != "never starts" else 503)
        self.end_headers()
    def log_message(self, *_): pass
shown = 0
if port:
    server = http.server.HTTPServer(("127.0.0.1", port), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
print(f"2026-01-31T12:00:00.000Z INFO rank turning rank={rank}", flush=True)
print("a native library greets", flush=True)
while not leave.exists():
    if behaviour == "talks":
        print(4000 * "x", flush=True)
        if (shown := shown + 1) == 100: write("talked")
    if lost.exists():
        print(f"baton: error: {lost.read_text()}", flush=True)
        os._exit(3)
    time.sleep(0.01)
os._exit(0)
"""


class Ranks:
    """Ranks of one worker, by behaviour, with a record of their fates."""

    def __init__(self, folder: Path) -> None:
        self.behaviour: dict[int, str] = {}
        """Behaviour by rank: refuses, crashes, talks (more than a pipe holds), never starts, deaf (to
        SIGTERM). Other ranks just run.
        """
        self.reported: list[tuple[str, int]] = []
        self.living_when_reported: list[list[int]] = []
        self.secrets: list[bytes] = []
        """Secret of each report."""
        self.unreachable = False
        """Whether reports fail, as while the bootstrap is away."""
        self._journal = folder / "journal"

    def group(self, tp: int = 3, **flags: Any) -> RankProcesses:
        settings = DecodeSettings(name="decode-0", tp=tp, **flags)
        backoff = Backoff(first_ms=10, most_ms=20)
        return RankProcesses(settings, os.environ, self._report, SystemClock(), self._command, backoff)

    def _command(self, settings: WorkerSettings) -> Sequence[str]:
        rank = settings.rank or 0
        behaviour = self.behaviour.get(rank, "runs")
        return (
            sys.executable,
            "-c",
            RANK,
            str(rank),
            str(settings.metrics_port),
            str(self._journal),
            behaviour,
        )

    async def _report(self, name: str, pid: int, secret: bytes) -> None:
        if self.unreachable:
            raise ConnectionError("no bootstrap")
        self.reported.append((name, pid))
        self.secrets.append(secret)
        self.living_when_reported.append([each for each in self.pids if not _gone(each)])

    @property
    def journal(self) -> list[str]:
        return self._journal.read_text().splitlines() if self._journal.exists() else []

    @property
    def digests(self) -> list[str]:
        """Digest of the starter's secret that each rank got, in the order in which ranks came up."""
        return Path(f"{self._journal}.digests").read_text().splitlines()

    @property
    def pids(self) -> list[int]:
        """Process id of every rank that came up, in that order."""
        return [int(line.split()[2]) for line in self.journal if " up " in line]

    def started(self) -> set[int]:
        """Return the ranks that came up."""
        return {int(line.split()[0]) for line in self.journal if " up " in line}

    def latest(self, rank: int) -> int:
        """Return the process id of the latest process of a rank."""
        return [int(line.split()[2]) for line in self.journal if line.startswith(f"{rank} up")][-1]

    def lose(self, why: str) -> None:
        """Make every rank that can end as if the group were lost."""
        lost = self._journal.with_name("written")
        lost.write_text(why)
        lost.rename(self._journal.with_name("lost"))

    def mend(self) -> None:
        self._journal.with_name("lost").unlink()

    async def up(self, count: int) -> None:
        """Wait until `count` ranks have come up, in all incarnations together."""
        await eventually(lambda: len(self.pids) >= count)

    def kill(self, rank: int) -> None:
        os.kill(self.latest(rank), signal.SIGKILL)


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
