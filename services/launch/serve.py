"""How does one command bring up, keep and take down a whole stack on this machine?"""

import asyncio
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final

import httpx
from rich.console import Console

from baton.cli.chat_settings import DEFAULT_URL
from baton.cli.options import Flags
from baton.launch.child import Child, describe_exit, start_child
from baton.launch.exit_reports import ReportExit, draw_exit_secret, reporter
from baton.launch.fork_server_client import ForkServer
from baton.launch.gpus import VISIBLE, find_gpus
from baton.launch.level_filter import LevelFilter
from baton.launch.model_check import check_models, draft_of
from baton.launch.prepare_model import PROGRESS
from baton.launch.screen import Screen
from baton.launch.serve_settings import (
    LOOPBACK,
    Operators,
    ServeSettings,
    StackCommand,
    StackPlan,
    load_serve,
    make_plan,
)
from baton.launch.supervisor import Supervisor
from baton.runtime.child_process import module_command
from baton.runtime.clock import SystemClock
from baton.runtime.cpu_affinity import allowed_cpus
from baton.runtime.errors import StartupError
from baton.runtime.listening_ports import bind_port, port_of
from baton.runtime.service_process import StopRequested, run, unless_stopped
from baton.runtime.settings import PREFIX
from baton.web.client_trust import distrusted

Command = Callable[[str, Sequence[str]], Sequence[str]]
MODULE: Final = "baton.cli.main"
PREPARE: Final = "prepare"
HTTP_TIMEOUT_S: Final = 2.0
NO_OPERATORS: Final = (
    "Nobody reads what it does (/ui, baton top): with several API keys that needs --admin-api-key-file,"
    " --admin-port or --open-admin"
)
STOP_MARGIN_MS: Final = 5_000
"""What a part may take to end beyond its own drain time."""


def run_serve(flags: Flags, also_known: frozenset[str]) -> int:
    """`baton serve`: returns the exit code. Raises StartupError."""
    settings = load_serve(flags, os.environ, also_known)
    grpc_port = _free_ports(settings)
    plan = make_plan(settings, flags, os.environ, allowed_cpus(), grpc_port, find_gpus(os.environ))
    drafts = {draft_of(_flags(part).get("--speculate", "")) for part in plan.workers} - {""}
    check_models(plan.model, plan.load_format, sorted(drafts), answers=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    screen = Screen(Console(), SystemClock())

    async def serve(shutdown: asyncio.Event) -> int:
        forks = None
        if any(part.computes for part in plan.workers):
            forks = ForkServer(environ, LevelFilter(settings.log_level), screen.say, SystemClock())
        return await ServeStack(settings, plan, environ, screen, forks=forks).serve(shutdown)

    return run(serve)


def _free_ports(settings: ServeSettings) -> int:
    """Fail before anything slow if a port is taken, or given twice. Returns the gRPC port to use."""
    with ExitStack() as taken:
        taken.enter_context(bind_port(settings.host, settings.port, "--port"))
        for port in settings.metrics_ports:
            taken.enter_context(bind_port(LOOPBACK, port, "--metrics-port"))
        grpc = taken.enter_context(bind_port(settings.grpc_host, settings.grpc_port, "--grpc-port"))
        return port_of(grpc)


def baton_command(word: str, arguments: Sequence[str]) -> Sequence[str]:
    """What runs `word`: a service's command, the very one that a pod runs, or PREPARE."""
    module = "baton.launch.prepare_model" if word == PREPARE else MODULE
    words = () if word == PREPARE else (word,)
    return module_command(module, *words, *arguments)


class ServeStack:
    """One run of `baton serve`."""

    def __init__(
        self,
        settings: ServeSettings,
        plan: StackPlan,
        environ: Mapping[str, str],
        screen: Screen,
        command: Command = baton_command,
        report_exit: ReportExit | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        """`forks`: what workers are forked from, where they are to be."""
        self._settings = settings
        self._plan = plan
        self._command = command
        self._report_exit = report_exit or reporter(plan.bootstrap_address, plan.tls, plan.run_token)
        self._environ = environ
        self._screen = screen
        self._forks = forks
        self._exit_files = Path()
        """By which a launcher that is started again reports the exit of the last one's ranks."""

    async def serve(self, shutdown: asyncio.Event) -> int:
        """Prepare, start, keep until `shutdown`, stop. Returns the exit code. Raises StartupError."""
        with TemporaryDirectory(prefix="baton-exits-") as folder:
            self._exit_files = Path(folder)
            async with self._forks or nullcontext():  # it imports while the model is prepared
                return await self._serve(shutdown)

    async def _serve(self, shutdown: asyncio.Event) -> int:
        try:
            await self._prepare_model(shutdown)
        except StopRequested:
            return 0
        supervisor = Supervisor(self._start_part, self._report_exit, self._screen.say, SystemClock())
        try:
            await self._start(supervisor, shutdown)
            await supervisor.keep(shutdown)
        except StopRequested:
            pass
        except BaseException:
            await self._stop(supervisor, STOP_MARGIN_MS)
            raise
        with self._screen.step("stopping: requests that started may finish; Ctrl-C again ends at once"):
            clean = await self._stop(supervisor, self._plan.drain_timeout_ms + STOP_MARGIN_MS)
        return 0 if clean else 1

    async def _start(self, supervisor: Supervisor, shutdown: asyncio.Event) -> None:
        plan, timeout_ms = self._plan, self._settings.ready_timeout_ms
        verify = True if plan.http_tls is None else plan.http_tls.pinned()
        headers = {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
        async with httpx.AsyncClient(
            base_url=plan.url, timeout=HTTP_TIMEOUT_S, trust_env=False, verify=verify, headers=headers
        ) as http:

            async def answers(path: str) -> bool:
                try:
                    return (await http.get(path)).is_success
                except httpx.ConnectError as error:
                    untrusted = distrusted(error, plan.url, "its files are those in --tls-dir")
                    if untrusted:  # it has expired, say: waiting does not mend it
                        raise StartupError(untrusted) from None
                    return False
                except httpx.TransportError:
                    return False

            with self._screen.step(f"starting the bootstrap on {plan.url}"):
                await supervisor.start([plan.bootstrap], lambda: answers("/health"), timeout_ms, shutdown)
            with self._screen.step(f"starting {', '.join(_described(part) for part in plan.workers)}"):
                if self._forks is not None:
                    await unless_stopped(shutdown, self._forks.settled())
                await supervisor.start(plan.workers, lambda: answers("/ready"), timeout_ms, shutdown)
            card = await _card_of(http)
        model = str(card.get("id") or Path(plan.model).name)
        for line in ready_lines(
            plan.url,
            model,
            self._settings.tls_dir,
            keyed=bool(plan.api_key),
            apart="--admin-port" in plan.bootstrap.flags,
            operators=plan.operators,
            drawing=card.get("default_sampling_params") or {},
            metrics=[page for part in plan.workers for page in _metrics(part)],
        ):
            self._screen.say(line)

    async def _stop(self, supervisor: Supervisor, timeout_ms: int) -> bool:
        """First no new requests while workers finish the running ones, then the workers."""
        return await supervisor.stop([[self._plan.bootstrap], self._plan.workers], timeout_ms)

    async def _start_part(self, part: StackCommand) -> Child:
        secret, given = draw_exit_secret() if part.computes else (b"", {})
        child = await self._start_process(part, {**self._environ, **part.environ, **given})
        child.exit_secret = secret
        return child

    async def _start_process(self, part: StackCommand, environ: Mapping[str, str]) -> Child:
        worth, say = LevelFilter(self._settings.log_level), self._screen.say
        if self._forks is not None and part.computes:
            words = (part.role, *part.flags)
            child = await self._forks.fork(part.name, words, environ, worth, say)
            if child is not None:
                return child
        flags = part.flags
        if part.registers_as and not part.computes:
            flags = (*flags, "--exit-file", str(self._exit_files / part.name))
        return await start_child(part.name, self._command(part.role, flags), environ, worth, say)

    async def _prepare_model(self, shutdown: asyncio.Event) -> None:
        """In a process of its own: it takes the tensor library, which stays out of this one."""
        with self._screen.step(f"preparing the model {self._plan.model}") as progress:

            def say(line: str) -> None:
                text = line.removeprefix("model: ")
                (progress if text.startswith(PROGRESS) else self._screen.say)(text.removeprefix(PROGRESS))

            child = await start_child(
                "model",
                self._command(PREPARE, (self._plan.model, self._plan.load_format)),
                self._environ,
                lambda line: line.startswith(PROGRESS),
                say,
            )
            try:
                code = await unless_stopped(shutdown, child.wait())
            except StopRequested:
                child.kill()
                await child.wait()
                raise
            if code != 0:
                why = child.own_words()
                if why is None:
                    child.show_hidden_lines()
                raise StartupError(why or f"preparing the model {self._plan.model} {describe_exit(code)}")


async def _card_of(http: httpx.AsyncClient) -> Mapping[str, Any]:
    """What clients are told of the model. Empty where they are not: the keys may be others by now."""
    try:
        card: Mapping[str, Any] = (await http.get("/v1/models")).json()["data"][0]
    except (httpx.TransportError, ValueError, KeyError, IndexError, TypeError):
        return {}
    return card


def ready_lines(
    url: str,
    model: str,
    tls_dir: str = "",
    *,
    keyed: bool = False,
    apart: bool = False,
    operators: Operators = Operators.CALLERS,
    drawing: Mapping[str, Any] = MappingProxyType({}),
    metrics: Sequence[str] = (),
) -> list[str]:
    """What to type now. `keyed`: the API asks for a key; `apart`: operators have a port of their own;
    `operators`: who reads their pages; `drawing`: how tokens are drawn where a request does not say it, if
    the model recommends that; `metrics`: where each worker's are, if that was asked for."""
    baton = command_words(sys.argv[0])
    question = "What is the capital of France?"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": question}]})
    to = "" if url == DEFAULT_URL else f" --url {url}"
    curl, before = "curl", []
    if keyed:
        before.append("  export OPENAI_API_KEY=…  # one of the API's keys")
        curl += ' -H "Authorization: Bearer $OPENAI_API_KEY"'
    if tls_dir:
        before.append(f"  export SSL_CERT_FILE={shlex.quote(os.path.abspath(tls_dir))}/ca.crt")  # noqa: PTH100
        curl += ' --cacert "$SSL_CERT_FILE"'
    if operators is Operators.ADMINS and not apart:
        before.append("  export BATON_ADMIN_API_KEYS=…  # an admin key, for the pages for operators")
    pages = f"What it does, and any request's story: {url}/ui or {baton} top{to}"
    if operators is Operators.NOBODY:
        pages = NO_OPERATORS
    told = ", ".join(f"{name} {value}" for name, value in drawing.items())
    return [
        f"Ready: {model} on {url}",
        *([f"Where a request does not say it, as the model recommends: {told}"] if told else []),
        "",
        *before,
        f"  {curl} {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        f"  {baton} chat{to} {shlex.quote(question)}",
        *([] if apart else ["", pages]),
        *(["", f"Metrics of the workers: {', '.join(metrics)}"] if metrics else []),
        "",
        "Ctrl-C stops it.",
    ]


def command_words(started_as: str) -> str:
    """How this very program is run again, from any directory. `started_as`: its own first argument."""
    script, found = os.path.abspath(started_as), shutil.which("baton")  # noqa: PTH100 - a link is kept
    if found and os.path.realpath(found) == os.path.realpath(script):
        return "baton"
    if script.endswith(".py"):
        return f"{shlex.quote(sys.executable)} -m {MODULE}"
    return shlex.quote(script)


def _described(part: StackCommand) -> str:
    gpus = f" and GPU {part.environ[VISIBLE]}" if VISIBLE in part.environ else ""
    return f"{part.name} on cores {_flags(part)['--cpus']}{gpus}"


def _metrics(part: StackCommand) -> list[str]:
    """Where its pages are, of each of its sides; none whose ports are any free ones."""
    flags = _flags(part)
    ports = {"": flags.get("--metrics-port"), "'s prefill side": flags.get("--prefill-metrics-port")}
    return [f"{part.name}{of} http://{LOOPBACK}:{port}/metrics" for of, port in ports.items() if port]


def _flags(part: StackCommand) -> dict[str, str]:
    return dict(zip(part.flags[::2], part.flags[1::2], strict=True))
