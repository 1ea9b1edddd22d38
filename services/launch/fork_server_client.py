"""Client of the fork server. It starts the server, restarts it when it ends, and requests workers from it.

    loading       the server imports. Requests wait for it.
    loaded        a request takes some ten milliseconds.
    restarting    the server ended. Requests return None until it is back, after a back-off.
    unavailable   the server ended before it was loaded, or the system cannot fork so. Requests return None.

If a request returns None, its caller starts the worker by its command.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Final

from baton.launch.child import (
    OUTPUT_TIMEOUT_S,
    Child,
    IsShown,
    Show,
    child_environ,
    describe_exit,
    start_child,
)
from baton.launch.fork_server import BEGIN, READY, ForkOrder
from baton.launch.restart_backoff import Backoff
from baton.runtime.child_process import FORK_SERVER, module_command
from baton.runtime.clock import Clock
from baton.runtime.parent_watch import adopting_orphans

NAME: Final = "preloaded"
LOAD_TIMEOUT_S: Final = 120.0
FORK_TIMEOUT_S: Final = 10.0
ANSWER_BYTES: Final = 4096


class ForkServer:
    """One fork server process. It runs as long as this object's context is entered."""

    def __init__(
        self,
        environ: Mapping[str, str],
        is_shown: IsShown,
        show: Show,
        clock: Clock,
        loaded: tuple[int, socket.socket] | None = None,
    ) -> None:
        """Describe the fork server to start.

        `environ`: environment in which the server imports libraries. `is_shown`, `show`: treatment of its
        output, as for `Child`. `loaded`: process id and socket of the first server, if this process has
        forked one from itself.
        """
        self._environ = environ
        self._is_shown = is_shown
        self._show = show
        self._clock = clock
        self._loaded = loaded
        self._requesting = asyncio.Lock()
        self._settled = asyncio.Event()
        """Event that is set once the fork server is loaded, or is known to be unavailable."""
        self._control: socket.socket | None = None
        """Socket for requests to the loaded fork server, or None."""
        self._process: Child | ForkedProcess | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ForkServer":
        self._keeper = asyncio.create_task(self._keep_running(), name="keep the fork server running")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeper is not None
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        if self._process is not None:
            self._process.kill()
            await self._process.wait()

    @property
    def pid(self) -> int | None:
        """Process id of the loaded fork server, or None."""
        return None if self._control is None or self._process is None else self._process.pid

    async def settled(self) -> None:
        """Wait until the fork server is loaded or known to be unavailable, which takes seconds."""
        await self._settled.wait()

    async def fork(
        self, name: str, words: tuple[str, ...], environ: Mapping[str, str], is_shown: IsShown, show: Show
    ) -> Child | None:
        """Request a forked child process that runs `baton WORDS` in the environment `environ`.

        The child behaves like one from `start_child`. Return None if there is no server to fork from.
        """
        async with self._requesting:
            await self._settled.wait()
            control, process = self._control, self._process
            if control is None or process is None:
                return None
            try:
                async with asyncio.timeout(FORK_TIMEOUT_S):
                    return await _fork(control, name, words, environ, is_shown, show)
            except BaseException as error:
                # The reply may still come, and the next request would take it for its own.
                self._control = None
                process.kill()
                if not isinstance(error, OSError):  # as a TimeoutError is
                    raise
                self._show(
                    f"{name} could not be forked ({error or 'no answer'}): it is started by its command"
                )
                return None

    async def _keep_running(self) -> None:
        backoff = Backoff()
        while True:
            started_ms = self._clock.now_ms()
            try:
                _check_system()
                loaded = await self._run()
            except (OSError, AttributeError):
                loaded = False
            finally:
                self._settled.set()
            if not loaded:
                return
            wait_ms = backoff.next_ms(self._clock.now_ms() - started_ms)
            await asyncio.sleep(wait_ms / 1000)

    async def _run(self) -> bool:
        """Run one fork server process until it has ended. Return whether it was loaded before. Raises
        OSError."""
        ours, process = await self._start()
        with ours:
            self._process = process
            try:
                loaded = await _is_ready(ours)
                if loaded:
                    self._control = ours
                    self._settled.set()
                else:
                    process.kill()
                code = await process.wait()
            finally:
                self._control = None
        self._process = None
        if loaded:
            self._show(f"{NAME} {describe_exit(code)}: workers start without it until it is back")
        return loaded

    async def _start(self) -> "tuple[socket.socket, Child | ForkedProcess]":
        """Return a running fork server process and its socket.

        It is the one that was forked from this process, if there is one, else a new one. Raises OSError.
        """
        if self._loaded is not None:
            (pid, ours), self._loaded = self._loaded, None
            ours.setblocking(False)
            return ours, ForkedProcess(pid)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, ExitStack() as unless_it_starts:
            unless_it_starts.callback(ours.close)
            command = module_command(FORK_SERVER, str(theirs.fileno()))
            files = (theirs.fileno(),)
            process = await start_child(NAME, command, self._environ, self._is_shown, self._show, files)
            unless_it_starts.pop_all()
        return ours, process


def _check_system() -> None:
    """Raise OSError or AttributeError if the system lacks the calls that forking workers needs.

    It runs before the server imports anything.
    """
    os.close(os.pidfd_open(os.getpid()))
    os.close(os.memfd_create("order"))
    with adopting_orphans():
        pass


async def _is_ready(control: socket.socket) -> bool:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            return await asyncio.get_running_loop().sock_recv(control, ANSWER_BYTES) == READY
    return False


async def _fork(
    control: socket.socket,
    name: str,
    words: tuple[str, ...],
    environ: Mapping[str, str],
    is_shown: IsShown,
    show: Show,
) -> Child:
    """Request one worker from the fork server on the socket `control`. Raises OSError."""
    loop = asyncio.get_running_loop()
    with ExitStack() as ours, ExitStack() as theirs:
        order = ForkOrder(words, child_environ(environ), os.getpid()).write()
        theirs.callback(os.close, order)
        reads, writes = os.pipe()
        theirs.callback(os.close, writes)
        output = ours.enter_context(os.fdopen(reads, "rb"))
        waits, begins = os.pipe()
        theirs.callback(os.close, waits)
        begin = ours.enter_context(os.fdopen(begins, "wb", buffering=0))
        with adopting_orphans():
            socket.send_fds(control, [b"o"], [order, writes, waits])
            reply = await loop.sock_recv(control, ANSWER_BYTES)
        theirs.close()
        pid, _, why = reply.decode().partition(" ")
        if int(pid or 0) == 0:
            raise OSError(why or "the process that it was to be forked from has ended")
        process = ForkedProcess(int(pid))
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), output)
        process.closes_later(transport)
        begin.write(BEGIN)
        begin.close()
        ours.pop_all()
    return Child(name, process, reader, is_shown, show)


class ForkedProcess:
    """Child process of this process that was forked by the fork server.

    It has the methods of an asyncio subprocess that `Child` uses.
    """

    def __init__(self, pid: int) -> None:
        """Open the forked process `pid`, so that its end can be awaited. Raises OSError if it is no child."""
        self.pid = pid
        self._file = os.pidfd_open(pid)
        try:
            os.waitid(os.P_PIDFD, self._file, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except OSError:
            os.close(self._file)
            raise
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._transport: asyncio.BaseTransport | None = None
        self._loop.add_reader(self._file, self._end)

    def closes_later(self, transport: asyncio.BaseTransport) -> None:
        """Close `transport`, which reads the child's output, some time after the child has ended.

        A process that the child started may keep the pipe's other end open for longer.
        """
        self._transport = transport

    async def wait(self) -> int:
        """Wait for the process's end. Return its exit code, or minus the number of its signal."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.done():
            signal.pidfd_send_signal(self._file, number)

    def _end(self) -> None:
        self._loop.remove_reader(self._file)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._file)
        self._ended.set_result(os.waitstatus_to_exitcode(status))
        if self._transport is not None:
            self._loop.call_later(2 * OUTPUT_TIMEOUT_S, self._transport.close)
