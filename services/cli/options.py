"""How does a settings class become a command's flags and help?

Every flag is taken as text and parsed by `settings.load`, so that the command line, the environment
and the help cannot disagree.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from services.runtime.errors import StartupError
from services.runtime.serve import tell
from services.runtime.settings import Setting

Flags = Mapping[str, str | None]
Command = Callable[[Flags], int]


def add_command(app: typer.Typer, name: str, settings: Sequence[Setting], run: Command, text: str) -> None:
    """Add `baton name`: `run` gets each setting's flag as typed, or None, and returns the exit code."""

    def call(**flags: str | None) -> None:
        try:
            code = run(flags)
        except StartupError as error:
            code = tell(error)
        raise typer.Exit(code)

    _takes(call, {each.name: _option(each) for each in settings})
    app.command(name, help=text)(call)


def _option(each: Setting) -> Any:
    default = each.default_text
    origin = f"{each.variable}, default {default}" if default else each.variable
    return Annotated[
        str | None,
        typer.Option(each.flag, help=f"{each.help} ({origin})", metavar=each.kind.metavar, show_default=False),
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
