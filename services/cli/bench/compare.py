"""How does Baton do beside another system, under the same load, in the same run?"""

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from baton.cli.bench.report import AsJson
from baton.runtime.errors import SettingsError, StartupError
from baton.runtime.serve import tell

DEFAULT_OUT: Final = Path("docs/benchmarks")


def compare(
    file: Annotated[Path | None, typer.Argument(help="A TOML file of systems; or --a and --b.")] = None,
    a: Annotated[str, typer.Option(help="A URL, or a command that starts a server.")] = "",
    b: Annotated[str, typer.Option(help="As --a: what it is set against.")] = "",
    a_url: Annotated[str, typer.Option(help="Where the command of --a listens.")] = "http://127.0.0.1:8000",
    b_url: Annotated[str, typer.Option(help="Where the command of --b listens.")] = "http://127.0.0.1:9000",
    rounds: Annotated[int | None, typer.Option(min=1, max=1000, help="In place of the file's.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Of the file's systems, these; repeat it.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for compare-NAME.json, .md, .svg, .html.")] = DEFAULT_OUT,
    name: Annotated[str, typer.Option(help="Default: the TOML file's name.")] = "",
    logs: Annotated[Path | None, typer.Option(help="Folder for the systems' logs.")] = None,
    _: AsJson = True,
) -> None:
    """Systems in turns under the same load: a table and bars, with ratios to the first. Writes files."""
    from baton.cli.bench.compare_report import machine, write_report
    from baton.cli.bench.comparison import Comparison, SystemSpec, filled, narrowed, read_comparison
    from baton.cli.bench.load_specs import planned
    from baton.cli.bench.rounds import measure_in_turns
    from baton.cli.bench.systems import System
    from baton.cli.bench.verdicts import judged
    from baton.runtime.model_files import prepare, resolve

    def say(line: str) -> None:
        typer.echo(line, err=True)

    def spec(letter: str, given: str, url: str) -> SystemSpec:
        if "://" in given.partition(" ")[0]:
            return SystemSpec(name=letter, url=given)
        return SystemSpec(name=letter, url=url, start=tuple(shlex.split(given)))

    try:
        if file is None:
            if not (a and b):
                raise SettingsError("name a TOML file, or both --a and --b")
            comparison = Comparison(systems=(spec("a", a, a_url), spec("b", b, b_url)))
        else:
            comparison = read_comparison(file)
        comparison = narrowed(comparison, only or [], rounds)
        folder = file.resolve().parent if file else Path.cwd()
        loads = [planned(each, folder) for each in comparison.loads]
        here = str(Path(sys.executable).parent)  # so that `baton` is this one
        environ = {**os.environ, "PATH": os.pathsep.join((here, os.environ.get("PATH", os.defpath)))}
        if comparison.model:
            source = resolve(comparison.model)
            environ |= {"MODEL_FILE": str(source.path), "MODEL_DIR": str(prepare(source, say))}
        specs = tuple(filled(each, environ) for each in comparison.systems)
        comparison = comparison.model_copy(update={"systems": specs})
        facts = machine()
        log_folder = logs or Path(tempfile.mkdtemp(prefix="baton-compare-"))
        log_folder.mkdir(parents=True, exist_ok=True)
        systems = [
            System(each, log_folder / f"{index}.log", folder, environ) for index, each in enumerate(specs)
        ]
        say(f"logs: {log_folder}")
        measured = measure_in_turns(systems, loads, say)
    except (StartupError, ValueError) as error:
        told = error if isinstance(error, StartupError) else SettingsError(str(error))
        raise typer.Exit(tell(told)) from None
    body = {
        "benchmark": "compare",
        "machine": facts,
        "loads": [{"title": each.title, **each.model_dump(mode="json")} for each in comparison.loads],
        "systems": [each.name for each in comparison.systems],
        **judged(comparison, measured),
    }
    label = name or (file.stem if file else "a-b")
    for path in write_report(out, label, comparison, body):
        say(f"written: {path}")
    print(json.dumps(body))
