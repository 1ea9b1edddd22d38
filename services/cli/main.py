"""Console script `baton`, with all its commands. Each command imports its heavy modules when it runs."""

import os
import signal
import socket
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Final

import typer

from baton.bootstrap.settings import BootstrapSettings
from baton.both.settings import BothSettings
from baton.cli.admin_commands import add_admin_commands
from baton.cli.bench import bench
from baton.cli.certs import certs
from baton.cli.chat_settings import ChatSettings
from baton.cli.options import add_command
from baton.cli.peers_flags import refuse_peers_flags
from baton.decode.settings import DecodeSettings
from baton.launch.engine_table import load_starter
from baton.launch.model_check import check_models, check_worker_models
from baton.launch.serve_settings import ServeSettings, not_taken, panels
from baton.prefill.settings import PrefillSettings
from baton.runtime import logging
from baton.runtime.cpu_affinity import pin
from baton.runtime.environment_check import check_interpreter, clean_environment
from baton.runtime.errors import SettingsError, StartupError
from baton.runtime.garbage_collection import collection_paused
from baton.runtime.service_process import report_startup_error
from baton.runtime.settings import PREFIX, Flags, load, settings_of, variables_of

KNOWN: Final = variables_of(BootstrapSettings, BothSettings, ServeSettings, ChatSettings)
"""Every `BATON_*` variable of the project. Each command refuses any other one as a mistake."""

SIDE: Final = f"{PREFIX}SIDE"

app = typer.Typer(
    name="baton",
    help="Serve large language models with prefill and decode in separate processes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _serve(flags: Flags) -> int:
    from baton.launch.serve import run_serve

    taken = {name: text for name, text in flags.items() if name != "colocated"}
    if flags.get("colocated"):
        if taken.get("both") is not None:
            raise SettingsError("--colocated is --both 1: give one of them")
        taken["both"] = "1"
    return run_serve(taken, KNOWN)


def _bootstrap(flags: Flags) -> int:
    settings = load(BootstrapSettings, flags, os.environ, KNOWN)
    logging.configure(settings.log_level, settings.log_format)
    check_models(settings.model, settings.load_format, needs_tokenizer=True, may_lack_weights=True)
    with collection_paused():
        from baton.bootstrap.wiring import run

    return run(settings)


def _prefill(flags: Flags) -> int:
    settings = load(PrefillSettings, flags, os.environ, KNOWN)
    if _launches(settings):
        return _launch(settings)
    with collection_paused():
        start_rank = load_starter(settings.engine, settings.device, "start_rank")
        from baton.prefill.wiring import run

    return run(settings, start_rank)


def _decode(flags: Flags) -> int:
    settings = load(DecodeSettings, flags, os.environ, KNOWN)
    if _launches(settings):
        return _launch(settings)
    with collection_paused():
        start_rank = load_starter(settings.engine, settings.device, "start_rank")
        from baton.decode.wiring import run

    return run(settings, start_rank)


def _worker(flags: Flags) -> int:
    """Run `baton worker`. With `--side` it is the command of that side, and takes only that
    side's settings."""
    side = flags.get("side") or os.environ.get(SIDE, "")
    given = {name: text for name, text in flags.items() if text is not None and name != "side"}
    if side == PrefillSettings.role:
        return _prefill(given)
    if side == DecodeSettings.role:
        return _decode(given)
    settings = load(BothSettings, flags, os.environ, KNOWN)
    _launches(settings)
    with collection_paused():
        start_both = load_starter(settings.engine, settings.device, "start_both")
        from baton.both.wiring import run

    return run(settings, start_both)


def _launches(settings: PrefillSettings | DecodeSettings) -> bool:
    """Set up logging, check the model and restrict the cores, before anything slow is imported.

    Return whether this process starts a worker's ranks, rather than being one.
    """
    logging.configure(
        settings.log_level, settings.log_format, rank=settings.rank if settings.grouped else None
    )
    check_worker_models(settings)
    if not settings.launches:
        pin(settings.cpus, settings.threads)
    return settings.launches


def _launch(settings: PrefillSettings | DecodeSettings) -> int:
    from baton.launch.rank_processes import run_ranks

    return run_ranks(settings, os.environ, serve_forked_commands)


def _chat(flags: Flags) -> int:
    from baton.cli.chat import run_chat

    return run_chat(flags.get("question"), {k: v for k, v in flags.items() if k != "question"}, KNOWN)


def _metrics(_: Flags) -> int:
    from baton.cli.metric_page import metric_page

    print(metric_page(), end="")
    return 0


def _version(_: Flags) -> int:
    try:
        number = distribution_version("baton-serve")
    except PackageNotFoundError:
        number = "(not installed: run from a source tree)"
    print(f"baton {number}")
    return 0


COLOCATED = Annotated[
    bool | None,
    typer.Option("--colocated", help="One process that serves both sides, for one GPU: as --both 1."),
]
QUESTION = Annotated[str | None, typer.Argument(help="What to ask; none starts a conversation.")]

add_command(
    app,
    "serve",
    panels(),
    _serve,
    "Start a whole stack on this machine: bootstrap, prefill and decode workers.",
    {"colocated": COLOCATED},
    refused=not_taken(),
)
for cls, run_one, text in (
    (BootstrapSettings, _bootstrap, "Run the bootstrap: the HTTP API and the router."),
    (PrefillSettings, _prefill, "Run one prefill worker."),
    (DecodeSettings, _decode, "Run one decode worker."),
    (BothSettings, _worker, "Run one worker of both sides in one process, or of the side that is named."),
):
    add_command(app, cls.role, {"Settings": settings_of(cls)}, run_one, text)
add_command(
    app,
    "chat",
    {"Settings": settings_of(ChatSettings)},
    _chat,
    "Talk to a running server: one question, or a conversation.",
    {"question": QUESTION},
)
app.command("certs")(certs)
add_admin_commands(app, KNOWN)
app.add_typer(bench)
add_command(app, "metrics", {}, _metrics, "List every metric of every service, as Markdown.")
add_command(app, "version", {}, _version, "Print the version.")


def serve_forked_commands(control: socket.socket) -> None:
    """Run the fork server, from which workers are forked, for requests on the socket `control`.

    In a forked worker this returns after the worker's command. In the server it returns once no requests can
    come any more.
    """
    from baton.launch.fork_server import serve_forks

    with control:
        is_worker = serve_forks(control, __file__)
    if is_worker:
        main()


def main() -> None:
    """Run the console script `baton`."""
    if os.getpid() == 1:
        # The kernel delivers no unhandled signal to a container's first process. From here on SIGTERM
        # ends this one. Once a service runs, it drains instead.
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        Path.cwd()
    except OSError as error:
        text = f"the directory that this was started in cannot be used ({error.strerror}): change to another"
        sys.exit(report_startup_error(StartupError(text)))
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal may lack some characters
        sys.stdout.reconfigure(errors="replace")
    try:
        check_interpreter()
    except StartupError as error:
        sys.exit(report_startup_error(error))
    dropped = clean_environment(os.environ)
    if dropped:
        reason = "dropped from the environment, as docs/settings.md says"
        print(f"baton: {reason}: {', '.join(dropped)}", file=sys.stderr)
    try:
        refuse_peers_flags(sys.argv[1:])
    except SettingsError as error:
        sys.exit(report_startup_error(error))
    app()


if __name__ == "__main__":
    main()
