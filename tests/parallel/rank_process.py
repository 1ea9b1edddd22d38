"""One rank of a gloo group as a process of its own: `rank size port time-out-seconds behaviour`.

Prints one line per thing that happened; the behaviours are what the tests ask for.
"""

import asyncio
import os
import signal
import sys

from services.parallel.gloo import GlooGroup
from services.parallel.interface import GroupBroken

TURNS = 3


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def live(rank: int, size: int, port: int, timeout_s: float, behaviour: str) -> None:
    try:
        group = await GlooGroup.join(rank, size, "127.0.0.1", port, timeout_s)
        for turn in range(TURNS):
            heard = await group.broadcast(b"turn %d" % turn if rank == 0 else None)
            agreed = await group.agree([turn, rank, -rank])
            say(heard.decode(), *agreed)
        if behaviour == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if behaviour == "on":
            await group.agree([0, 0, 0])
        await group.close()
    except GroupBroken as error:
        say("broken:", error)


rank, size, port = map(int, sys.argv[1:4])
asyncio.run(live(rank, size, port, float(sys.argv[4]), sys.argv[5]))
