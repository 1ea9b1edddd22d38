"""How do the ranks of one worker come up on this machine, end, and come back, as one?

starting   until turns go on a rank that ends is fatal: its words are this process's
running    a rank that ends takes the others with it: they get a moment to say why, then they are killed; when
           all are gone the bootstrap is told, and the group is started again, with back-off
stopping   the leader is told, and all ranks leave when their rooms have ended

Of a worker on several machines each has its part. Nobody here knows when the other parts have ended: when a
rank ends its part is over, for whoever started the parts to start all of them again.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Final

import httpx

from baton.launch.child import Child, start_child
from baton.launch.core_shares import deal_cores
from baton.launch.exit_reports import ReportExit, draw_exit_secret, report_exit_repeatedly, reporter, wait
from baton.launch.fork_server import split
from baton.launch.fork_server_client import ForkServer
from baton.launch.level_filter import HEAD
from baton.launch.rank_exits import Ended, collect, death
from baton.launch.restart_backoff import Backoff
from baton.launch.shape_check import check_shape
from baton.runtime.child_process import module_command
from baton.runtime.clock import Clock, SystemClock
from baton.runtime.cpu_affinity import allowed_cpus
from baton.runtime.errors import EXIT_FAILED, StartupError
from baton.runtime.exit_file import ExitFile, ExitRecord
from baton.runtime.listening_ports import port_of, reserve_port
from baton.runtime.logging import Log
from baton.runtime.service_process import run, unless_stopped
from baton.runtime.setting_kinds import join_address
from baton.runtime.settings import PREFIX, to_environ, to_flags
from baton.runtime.worker_settings import WILDCARDS, WorkerSettings

log = Log(__name__)

LOOPBACK: Final = "127.0.0.1"
LEAVING_S: Final = 10.0
"""For the other ranks, after one has left in order: the leader still says goodbye."""
STOP_MARGIN_S: Final = 3.0
POLL_S: Final = 0.25
HTTP_TIMEOUT_S: Final = 2.0

Command = Callable[[WorkerSettings], Sequence[str]]


def run_ranks(settings: WorkerSettings, environ: Mapping[str, str]) -> int:
    """Run a worker of several ranks until it is told to stop. Returns the exit code. Raises StartupError."""
    check_shape(settings)
    several = len(settings.ranks_here) > 1
    loaded = split() if several else None

    async def serve(shutdown: asyncio.Event) -> int:
        report_exit = reporter(settings.bootstrap, settings.tls, settings.run_token)
        if not several:
            return await RankProcesses(settings, environ, report_exit, SystemClock()).serve(shutdown)
        own = without_settings(environ)
        async with ForkServer(own, lambda _: False, _by_commands, SystemClock(), loaded) as forks:
            await unless_stopped(shutdown, forks.settled())
            group = RankProcesses(settings, environ, report_exit, SystemClock(), forks=forks)
            return await group.serve(shutdown)

    return run(serve)


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what was said to the launcher, which a rank is told anew."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX)}


def _by_commands(why: str) -> None:
    log.warning("ranks start by their commands", why=why)


def baton_command(settings: WorkerSettings) -> Sequence[str]:
    return module_command("baton.cli.main", settings.role, *to_flags(settings))


class RankProcesses:
    """The ranks of one worker, incarnation after incarnation. Used by one task."""

    def __init__(
        self,
        settings: WorkerSettings,
        environ: Mapping[str, str],
        report_exit: ReportExit,
        clock: Clock,
        command: Command = baton_command,
        backoff: Backoff | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        """`forks`: what ranks are forked from, where they are to be."""
        self._settings = settings
        self._environ = without_settings(environ) | to_environ(settings)
        self._report_exit = report_exit
        self._clock = clock
        self._command = command
        self._backoff = Backoff() if backoff is None else backoff
        self._forks = forks
        self._had_started = False

    async def serve(self, shutdown: asyncio.Event) -> int:
        """Keep the group running until `shutdown`. Returns the exit code. Raises StartupError if it does not
        come up the first time."""
        with ExitStack() as reserved:
            file = None
            if self._settings.exit_file:
                from baton.worker.lifecycle.exit_reporter import report_previous  # loads gRPC

                file = reserved.enter_context(await asyncio.to_thread(ExitFile, self._settings.exit_file))
                reporting = asyncio.create_task(report_previous(file, self._report_exit))
                reserved.callback(reporting.cancel)
            # Nobody else is given these ports, while a rank that is told of one may listen there.
            host, port = self._settings.host, self._settings.metrics_port
            pages = port_of(reserved.enter_context(reserve_port(host, port, "--metrics-port")))
            meeting = self._settings.rendezvous or join_address(
                LOOPBACK, port_of(reserved.enter_context(reserve_port(LOOPBACK)))
            )
            ranks = self._ranks(meeting, pages)
            while True:
                started_ms = self._clock.now_ms()
                ended = await self._run_once(ranks, pages, shutdown, file)
                if ended.in_order or (shutdown.is_set() and not ended.started):
                    return 0
                if shutdown.is_set():
                    log.warning("the group did not leave in order", cause=ended.why)
                    return EXIT_FAILED
                if not self._had_started or self._settings.machines > 1:
                    raise death(ended)
                wait_ms = self._backoff.next_ms(self._clock.now_ms() - started_ms)
                words = ended.first.own_words()
                log.error("the group ended: starting it again", why=ended.why, cause=words, wait_ms=wait_ms)
                await wait(shutdown, wait_ms / 1000)
                if shutdown.is_set():
                    return 0

    def _ranks(self, rendezvous: str, pages: int) -> list[WorkerSettings]:
        """What each rank that is started here is told. The cores are dealt out; only the first listens where
        it was said."""
        settings, here = self._settings, self._settings.ranks_here
        shares = deal_cores(settings.cpus or allowed_cpus(), len(here))
        return [
            replace(
                settings,
                rank=rank,
                rendezvous=rendezvous,
                machines=1,
                machine=None,
                cpus=cpus,
                metrics_port=pages if rank == here[0] else 0,
                grpc_port=settings.grpc_port if rank == 0 else 0,
            )
            for rank, cpus in zip(here, shares, strict=True)
        ]

    async def _run_once(
        self, ranks: Sequence[WorkerSettings], pages: int, shutdown: asyncio.Event, file: ExitFile | None
    ) -> Ended:
        """One incarnation, from the start of its ranks until all of them were seen to exit."""
        secret, given = self._own_exit()
        children = [await self._start(each, given) for each in ranks]
        if file is not None:
            _update(lambda: file.leave([ExitRecord(self._settings.name, children[0].pid, secret)]))
        ends = {asyncio.create_task(child.wait()): child for child in children}
        stop = asyncio.create_task(shutdown.wait())
        started = asyncio.create_task(self._see_started(pages))
        codes: dict[Child, int] = {}
        await asyncio.wait({stop, *ends}, return_when=asyncio.FIRST_COMPLETED)
        # Who has started by now is asked to leave; whoever does so later was not asked.
        came_up = started.done()
        left_s = LEAVING_S
        if shutdown.is_set():
            left_s = self._settings.drain_timeout_ms / 1000 + STOP_MARGIN_S if came_up else 0.0
            children[0].ask_to_stop()
        await collect(ends, codes, left_s)
        killed = [child for child in children if child not in codes]
        for child in killed:
            log.warning("killing a rank that has not ended", which=child.name, pid=child.pid)
            child.kill()
        await collect(ends, codes, None)
        ended = Ended(codes, frozenset(killed), came_up)
        stop.cancel()
        started.cancel()
        self._had_started |= ended.started
        if self._had_started and not ended.in_order and self._settings.machines == 1:
            # All of them have exited: nothing of this incarnation is written any more.
            name, pid = self._settings.name, children[0].pid
            reason = await report_exit_repeatedly(self._report_exit, name, pid, secret, shutdown)
            if reason is not None:
                log.warning("the bootstrap could not be told that the group ended", cause=reason)
                if file is not None:
                    _update(lambda: file.retain(ExitRecord(name, pid, secret)))
        return ended

    def _own_exit(self) -> tuple[bytes, Mapping[str, str]]:
        """A secret to report the exit of the next incarnation, and the variables of its ranks.

        The launcher of one machine does not know when the ranks of others have ended: it can report nothing.
        """
        return draw_exit_secret() if self._settings.machines == 1 else (b"", {})

    async def _start(self, settings: WorkerSettings, given: Mapping[str, str]) -> Child:
        """`given`: variables of the ranks of this incarnation."""
        name, environ = f"rank {settings.rank}", {**self._environ, **given}

        def say(line: str) -> None:
            """A rank's log lines say which rank it is; nothing else that it writes does."""
            own = line.removeprefix(f"{name}: ")
            with suppress(OSError):  # a full disk, say: who does not read on stops the ranks
                print(own if HEAD.match(own) else line, file=sys.stderr, flush=True)

        if self._forks is not None:
            words = (settings.role, *to_flags(settings))
            child = await self._forks.fork(name, words, environ, lambda _: True, say)
            if child is not None:
                return child
        return await start_child(name, self._command(settings), environ, lambda _: True, say)

    async def _see_started(self, pages: int) -> None:
        """Returns when the first rank here has started. That it is ready it hears itself only with a renewal
        of its lease, when rooms may long have come."""
        host = LOOPBACK if self._settings.host in WILDCARDS else self._settings.host
        url = f"http://{join_address(host, pages)}/started"
        async with httpx.AsyncClient(timeout=HTTP_TIMEOUT_S, trust_env=False) as http:
            while True:
                with suppress(httpx.TransportError):
                    if (await http.get(url)).is_success:
                        return
                await asyncio.sleep(POLL_S)


def _update(write: Callable[[], None]) -> None:
    """Write to the exit file. Ranks go on without it: then the next launcher reports no exit."""
    try:
        write()
    except StartupError as error:
        log.warning("the exit of these ranks will not be reported by another launcher", cause=str(error))
