"""How does a settings class become a command's flags and help?

Every flag is taken as text and parsed by `settings.load`, so that the command line, the environment
and the help cannot disagree.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final

import typer

from baton.runtime.errors import StartupError
from baton.runtime.service_process import tell
from baton.runtime.settings import Setting

EPILOG: Final = "Each can be given as a variable too, such as BATON_LOG_LEVEL for --log-level; a flag wins."

Flags = Mapping[str, str | None]
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
    """Add `baton name`: `run` gets each setting's flag as typed, or None, and returns the exit code.

    `panels` are the settings under the headings that the help shows them under. `arguments` are further
    parameters with typer's annotations, of type `str | None` like the flags. `refused` are flags that no help
    shows, for `run` to say what to give instead.
    """

    def call(**flags: str | None) -> None:
        try:
            code = run(flags)
        except StartupError as error:
            code = tell(error)
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
    """Without a panel no help shows it."""
    default = f" (default: {each.default_text})" if each.default_text else ""
    return Annotated[
        str | None,
        typer.Option(
            each.flag,
            help=each.help + default,
            metavar=each.kind.metavar,
            show_default=False,
            rich_help_panel=panel,
            hidden=panel is None,
        ),
    ]


def _takes(function: Callable[..., None], annotations: Mapping[str, Any]) -> None:
    """Give `function` keyword parameters that typer can read."""
    function.__annotations__ = dict(annotations)
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in annotations.items()
        ]
    )
