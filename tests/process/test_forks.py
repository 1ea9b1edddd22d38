"""Tests that a forked process is like one started by its command."""

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests import forks
from tests.forks import ForkedProcess, clean_environ, fork_answering, fork_baton, fork_call
from tests.launch.stand_ins import gone
from tests.preloaded import WORKERS

PATIENCE_S = 60.0


def baton(output: Path, *words: str) -> ForkedProcess:
    with output.open("ab") as sink:
        return fork_baton(words, clean_environ(), sink.fileno())


@pytest.mark.parametrize(
    "words", [("version",), ("decode", "--no-such-flag"), ("bootstrap", "--model", "/nowhere")], ids=" ".join
)
def test_its_exit_code_and_its_words_are_those_of_its_command(tmp_path: Path, words: tuple[str, ...]) -> None:
    said = tmp_path / "said"
    code = baton(said, *words).wait(PATIENCE_S)
    command = [sys.executable, "-m", "baton.cli.main", *words]
    other = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=clean_environ()
    )
    assert (code, said.read_text()) == (other.returncode, other.stdout)


def test_it_is_waited_for_and_ended_as_any_child() -> None:
    process, pipe = fork_answering(_pause, ())
    assert pipe.recv() == process.pid, "its session is its own"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.02)
    assert process.poll() is None
    process.terminate()
    assert process.wait(PATIENCE_S) == process.poll() == process.returncode == -signal.SIGTERM
    assert gone(process.pid)
    process.kill()  # nobody else has its number


def _pause(pipe: Connection) -> None:
    pipe.send(os.getsid(0))
    signal.pause()


def test_an_answer_comes_through_its_pipe() -> None:
    process, pipe = fork_answering(_double, ())
    pipe.send(21)
    assert pipe.poll(PATIENCE_S)
    assert pipe.recv() == 42
    assert process.wait(PATIENCE_S) == 0


def _double(pipe: Connection) -> None:
    pipe.send(2 * pipe.recv())


def test_once_what_is_forked_from_has_ended_one_fork_says_so_and_the_next_has_another() -> None:
    living = fork_call(signal.pause, ())
    own = forks.own_server(os.getpid(), WORKERS)
    assert own.parent is not None
    own.parent.process.kill()
    with pytest.raises(AssertionError, match="nothing can be forked"):
        fork_call(os.getpid, ())
    assert living.poll() is None
    living.kill()
    assert living.wait(PATIENCE_S) == -signal.SIGKILL
    assert fork_call(os.getpid, ()).wait(PATIENCE_S) == 0
