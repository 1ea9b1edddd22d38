"""One rank of a gloo group as a process of its own.

Says one line per thing that happened; the behaviours are what the tests ask for, after three turns:

    end       leave in order                      on      agree once more
    die       SIGKILL itself                      wait    hear one broadcast more from an idle leader
    freeze    SIGSTOP itself                      rest    be that leader, as long as the test lets it live
    stray     live on, but come to no collective  idle    wait some seconds for the leader, and count CPU time
"""

import asyncio
import os
import resource
import signal
from pathlib import Path

import uvloop

from baton.parallel.gloo import GlooGroup
from baton.parallel.rank_group import GroupBroken

TURNS = 3
REST_S = 60
IDLE_S = 3


def run(said: Path, rank: int, size: int, port: int, timeout_s: float, behaviour: str) -> None:
    """Run one rank with this behaviour. It writes its lines to the file `said`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    uvloop.run(live(said, rank, size, port, timeout_s, behaviour))


async def live(said: Path, rank: int, size: int, port: int, timeout_s: float, behaviour: str) -> None:
    def say(*words: object) -> None:
        with said.open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    try:
        group = await GlooGroup.join(rank, size, "127.0.0.1", port, timeout_s)
        for turn in range(TURNS):
            heard = await group.broadcast(b"turn %d" % turn if rank == 0 else None)
            agreed = await group.agree([turn, rank, -rank])
            say(heard.decode(), *agreed)
        match behaviour:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "stray" | "rest":
                await asyncio.sleep(REST_S)
            case "wait":
                await group.broadcast(None)
            case "on":
                await group.agree([0, 0, 0])
            case "idle":
                before = cpu_s()
                if rank == 0:
                    await asyncio.sleep(IDLE_S)
                await group.broadcast(b"" if rank == 0 else None)
                say("idle", cpu_s() - before)
        await group.close()
    except GroupBroken as error:
        say("broken:", error)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
