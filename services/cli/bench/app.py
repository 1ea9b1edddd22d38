"""How far from the machine's limits is a part of Baton? Each command measures both in one run, in turns.

    baton bench transfer    pages over NIXL between two processes, beside memcpy of the same bytes
    baton bench step        one decode step, beside reading the model's weights once
    baton bench agree       a turn's agreement of 1, 2 and 3 ranks, beside gloo's all-reduce of the same bytes

Each prints one JSON object with the medians and their ratio. Absolute times are the machine's; quote ratios.
What takes long to load is imported by the command that needs it.
"""

import typer

from services.cli.bench.agree import agree
from services.cli.bench.step import step
from services.cli.bench.transfer import transfer

bench = typer.Typer(name="bench", help="Measure a part beside its limit; prints JSON.", no_args_is_help=True)
for command in (transfer, step, agree):
    bench.command()(command)
