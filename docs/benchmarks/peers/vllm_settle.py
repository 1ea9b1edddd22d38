"""Keep a started vLLM server on its core, and its idle spinning out of the way.

    vllm_settle.py PID CORE [--nice-spinning]

With the NIXL connector, vLLM moves its worker to the last core of the machine: every thread of PID and of
its descendants is put back to CORE. NIXL's progress thread spins; `--nice-spinning` finds the threads that
use a core while no request runs, and gives them the lowest priority.
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

WATCHED_S = 3.0
SPINS_SHARE = 0.1


def threads(pid: int) -> list[Path]:
    """Their folders: /proc/THREAD would tell of the whole process."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return [each for process in processes for each in Path(f"/proc/{process.pid}/task").iterdir()]


def cpu_s(thread: Path) -> float:
    words = (thread / "stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    pid, core = int(sys.argv[1]), int(sys.argv[2])
    for thread in threads(pid):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), {core})
    if "--nice-spinning" in sys.argv[3:]:
        before = {thread: cpu_s(thread) for thread in threads(pid)}
        time.sleep(WATCHED_S)
        for thread in set(threads(pid)) & before.keys():
            if cpu_s(thread) - before[thread] > SPINS_SHARE * WATCHED_S:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)
                name = (thread / "comm").read_text().strip()
                print(f"thread {thread.name} ({name}) spins: nice 19", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
