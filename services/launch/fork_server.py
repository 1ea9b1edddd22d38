"""From what does a worker start that has nothing to import? From a process that has imported all of it.

    python -m baton.launch.fork_server SOCKET

It says READY on the socket, a descriptor that it inherits, and forks a worker for each order that comes:

order     three files: what is to be run (`Order`), what that writes to, and a pipe
answer    the worker's process id; 0 and why, where there is none

The worker becomes a child of whoever asked (`parent_watch.adopting`), who sees its exit as that of
a process of its own, and with whom it ends. It begins with the pipe's first byte, and ends where that is
closed instead: nobody runs who is not known to the asker.

A worker of several ranks, once forked, has all of that too: what its ranks are forked from is forked from it
(`split`), and imports nothing again.

What does not outlive a fork is not begun here: there is one thread, and nothing is asked of gRPC, of CUDA or
of OpenMP. A worker does the rest as one that was started by its command: the same function, with its own
arguments, environment, session and cores.
"""

import errno
import gc
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

from baton.launch.process_title import set_process_title
from baton.runtime.child_process import module_command
from baton.runtime.environment_check import settle
from baton.runtime.parent_watch import die_with_parent

READY: Final = b"ready"
BEGIN: Final = b"b"
MODULE: Final = "baton.cli.main"
WORKERS: Final = ("baton.both.wiring", "baton.engine.engine_startup")
"""What takes long to import."""
FILES: Final = 3
PID_BYTES: Final = 32
THREADS: Final = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class Order:
    """A worker that is wanted."""

    words: tuple[str, ...]
    """Of the command `baton`."""
    environ: dict[str, str]
    """All of it."""
    asker: int
    """The process that is to be its parent."""

    @property
    def command(self) -> tuple[str, ...]:
        """The one that does the same."""
        return module_command(MODULE, *self.words)

    def write(self) -> int:
        """An open file that holds it. Raises OSError."""
        file = os.memfd_create("order")
        os.write(file, json.dumps(asdict(self)).encode())
        return file

    @classmethod
    def read(cls, file: int) -> "Order":
        """What `write` wrote."""
        told = json.loads(Path(f"/proc/self/fd/{file}").read_bytes())
        return cls(tuple(told["words"]), told["environ"], told["asker"])


def serve(control: socket.socket, modules: Sequence[str] = WORKERS) -> bool:
    """Import `modules`, and fork for whoever asks. Returns True in a worker, which is to run the command now,
    and False in this process once nobody can ask any more."""
    _import_all(modules)
    control.send(READY)
    while True:
        message, files, _, _ = socket.recv_fds(control, 1, FILES)
        if not message:
            return False
        order, output, begin = files
        worker = _fork()
        if worker == 0:
            control.close()
            _become(order, output, begin)
            return True
        for file in files:
            os.close(file)
        control.send(f"{max(worker, 0)} {os.strerror(-worker) if worker < 0 else ''}".encode())


def _import_all(modules: Sequence[str]) -> None:
    """Also where it was not left out of the environment: a library that computes would start its threads."""
    settle(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.disable()
    import baton.cli.main  # noqa: F401

    for each in modules:
        import_module(each)
    gc.collect()
    gc.freeze()  # what is looked through is written to, and shared no more
    threads = _threads()
    if threads > 1:
        sys.exit(f"{threads} threads run after the imports: no worker is forked from here")


def _threads() -> int:
    return len(list(THREADS.iterdir()))


def split() -> tuple[int, socket.socket] | None:
    """Fork one that serves as this module does, and ends with this process: its process id, and the socket on
    which it says READY. None where this process has not imported everything, no longer has one thread, or
    cannot be forked."""
    if not sys.modules.keys() >= set(WORKERS) or _threads() > 1:
        return None
    asker = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = _fork_or_error()
    if pid != 0:
        theirs.close()
        return (pid, ours) if pid > 0 else None
    ours.close()
    die_with_parent(asker)
    os.setsid()
    set_process_title(module_command("baton.launch.fork_server", str(theirs.fileno())))
    _serve_and_run(theirs)
    sys.exit(0)


def _serve_and_run(control: socket.socket) -> None:
    with control:
        is_worker = serve(control)
    if is_worker:
        from baton.cli.main import main

        main()


def _fork() -> int:
    """The process id of a grandchild, whose parent has ended; 0 in that grandchild; less, an error's number,
    where there is none."""
    told, tell = os.pipe()
    between = _fork_or_error()
    if between == 0:
        worker = _fork_or_error()
        if worker != 0:
            os.write(tell, str(worker).encode())
            os._exit(0)
        os.close(told)
        os.close(tell)
        return 0
    os.close(tell)
    worker = between if between < 0 else int(os.read(told, PID_BYTES) or -errno.ECHILD)
    os.close(told)
    if between > 0:
        os.waitpid(between, 0)
    return worker


def _fork_or_error() -> int:
    """As `os.fork`; less than 0, an error's number, where it fails."""
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or errno.EAGAIN)


def _become(file: int, output: int, begin: int) -> None:
    """What `baton.launch.child.start_child` makes of a process, here by itself."""
    if os.read(begin, 1) != BEGIN:
        os._exit(1)
    order = Order.read(file)
    die_with_parent(order.asker)
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    for each in (file, output, begin):
        os.close(each)
    os.environ.clear()
    os.environ.update(order.environ)
    import baton.cli.main as command

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        # An import, of another build, has asked CUDA: it all begins anew.
        os.execv(order.command[0], order.command)  # noqa: S606
    sys.argv[:] = [str(command.__file__), *order.words]
    set_process_title(order.command)
    gc.enable()


if __name__ == "__main__":
    _serve_and_run(socket.socket(fileno=int(sys.argv[1])))
