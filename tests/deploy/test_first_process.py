"""Tests of the stop signal to a container's first process, also before it serves."""

import signal
import subprocess
import sys

STARTING = """
import os, sys, time
os.getpid = lambda: 1
from baton.cli import main
def start():
    print("starting", flush=True)
    time.sleep(60)
main.app = start
main.main()
"""


def test_a_first_process_that_is_still_starting_ends_when_it_is_told_to() -> None:
    """Without its own handler, the kernel does not deliver SIGTERM to process 1, and the grace period
    passes."""
    process = subprocess.Popen([sys.executable, "-c", STARTING], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"starting\n"
    process.send_signal(signal.SIGTERM)
    assert (
        process.wait(30) == 128 + signal.SIGTERM
    )  # by its handler: by the signal itself it would be negative
    process.stdout.close()
