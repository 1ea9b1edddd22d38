"""Command-line definitions of `baton top`, `explain` and `role`. Their code is imported when they run."""

from collections.abc import Callable
from typing import Annotated

import typer

from baton.runtime.errors import StartupError
from baton.runtime.service_process import report_startup_error

Url = Annotated[
    str | None,
    typer.Option(
        help="Where the bootstrap is: its API, or its --admin-port; BATON_URL (default: http://127.0.0.1:8000).",
        metavar="URL",
    ),
]
AdminKeyFile = Annotated[
    str | None,
    typer.Option(
        help="File whose first line is an admin key; BATON_ADMIN_API_KEY_FILE, or the key in"
        " BATON_ADMIN_API_KEYS or OPENAI_API_KEY.",
        metavar="FILE",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def add_admin_commands(app: typer.Typer, known: frozenset[str]) -> None:
    """Add the commands `top`, `explain` and `role` to `app`. `known`: every `BATON_*` variable of the
    project."""

    @app.command()
    def top(
        url: Url = None,
        admin_api_key_file: AdminKeyFile = None,
        once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
        as_json: AsJson = False,
    ) -> None:
        """Show the running stack, redrawn each second: workers, queues, pages, rooms and the
        newest requests."""
        from baton.cli.admin import Bootstrap
        from baton.cli.top import run_top

        _run(lambda: run_top(Bootstrap(url, admin_api_key_file), known, once=once, as_json=as_json))

    @app.command()
    def explain(
        request_id: Annotated[
            str, typer.Argument(help="A request's id (X-Request-Id), an answer's (chatcmpl-…) or a room's.")
        ],
        url: Url = None,
        admin_api_key_file: AdminKeyFile = None,
        as_json: AsJson = False,
    ) -> None:
        """Show what happened to one request: the cause of a failure first, then its timeline."""
        from baton.cli.admin import Bootstrap
        from baton.cli.explain import run_explain

        _run(lambda: run_explain(request_id, Bootstrap(url, admin_api_key_file), known, as_json=as_json))

    @app.command()
    def role(
        name: Annotated[str, typer.Argument(help="The process, as its --name says, such as worker-0.")],
        prefill: Annotated[
            int,
            typer.Option(min=0, max=100, help="Of 100 parts of its time, for prefill."),
        ],
        url: Url = None,
        admin_api_key_file: AdminKeyFile = None,
    ) -> None:
        """Set how a process that serves both sides divides its time between them, from the next
        request on."""
        from baton.cli.admin import Bootstrap
        from baton.cli.role import run_role

        _run(lambda: run_role(name, prefill, Bootstrap(url, admin_api_key_file), known))


def _run(command: Callable[[], int]) -> None:
    try:
        code = command()
    except StartupError as error:
        code = report_startup_error(error)
    raise typer.Exit(code)
