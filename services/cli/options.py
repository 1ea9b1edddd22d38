"""Command-line flags and help texts of commands, made from settings classes.

Each flag is taken as text and parsed by `settings.load`. So command line, environment and help cannot
disagree.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final

import typer

from baton.runtime.errors import StartupError
from baton.runtime.service_process import report_startup_error
from baton.runtime.settings import Flags, Setting

EPILOG: Final = "Each can be given as a variable too, such as BATON_LOG_LEVEL for --log-level; a flag wins."

Command = Callable[[Flags], int]


def add_command(
    app: typer.Typer,
    name: str,
    panels: Mapping[str, Sequence[Setting]],
    run: Command,
    text: str,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    refused: Sequence[Setting] = (),
) -> None:
    """Add the command `baton NAME` to the console script.

    `panels`: settings by the headings of the help. `run`: gets each setting's flag as typed, or None, and
    returns the exit code. `arguments`: further parameters with typer's annotations, of type `str | None`.
    `refused`: settings whose flags are hidden, so that `run` can name what to give instead.
    """

    def call(**flags: str | None) -> None:
        try:
            code = run(flags)
        except StartupError as error:
            code = report_startup_error(error)
        raise typer.Exit(code)

    options = {
        each.name: _option(each, panel)
        for panel, group in panels.items()
        for each in group
        if not each.secret
    }
    hidden = {each.name: _option(each) for each in refused}
    _takes(call, {**arguments, **options, **hidden})
    app.command(name, help=text, epilog=EPILOG if options else None)(call)


def _option(each: Setting, panel: str | None = None) -> Any:
    """Return the typer option for a setting, under the help heading `panel`. Without one the help
    hides it."""
    default = f" (default: {each.default_text})" if each.default_text else ""
    return Annotated[
        str | None,
        typer.Option(
            *each.flags,
            help=each.help + default,
            metavar=each.kind.metavar,
            show_default=False,
            rich_help_panel=panel,
            hidden=panel is None,
        ),
    ]


def _takes(function: Callable[..., None], annotations: Mapping[str, Any]) -> None:
    """Give `function` a signature of keyword parameters, by name and annotation, from which typer makes a
    command's flags."""
    function.__annotations__ = dict(annotations)
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in annotations.items()
        ]
    )
