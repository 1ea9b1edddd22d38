"""How far from the machine's limits is a part of Baton? Each command measures both in one run, in turns.

    baton bench transfer    pages as prefill pushes them, beside bare NIXL writes of as many bytes and memcpy
    baton bench handover    one request's time by stage, and what its hand-over costs beside the transfer
    baton bench choices     several answers to one prompt beside one: bytes sent, time to the first token
    baton bench rooms       rooms opened to retired with a toy engine, beside bare gRPC calls
    baton bench step        a decode step beside reading weights and KV once, a prefill beside its products
    baton bench grammars    an event loop's longest gap while grammars are compiled, beside one at rest
    baton bench perplexity  a text's perplexity with the model's weights as codes, beside plain ones
    baton bench agree       a turn's agreement of 1, 2 and 3 ranks, beside gloo's all-reduce of the same bytes
    baton bench router      the bootstrap on one core before workers that answer at once
    baton bench place       a placement before many workers beside few, and with many rooms open
    baton bench burst       many requests at once, and a steady flow: what was answered, what failed
    baton bench growth      chats without an end on a cache that does not hold all, beside one that does
    baton bench speculation answers with drafts of what comes next, beside the same without
    baton bench serve       any OpenAI-compatible server under load: first token, time per token, goodput
    baton bench compare     Baton and other systems under the same load, in turns; writes a table and bars

Each prints one JSON object with the medians and their ratio. Absolute times are the machine's; quote ratios.
What takes long to load is imported by the command that needs it.
"""

import typer

from baton.cli.bench.agree import agree
from baton.cli.bench.burst import burst
from baton.cli.bench.choices import choices
from baton.cli.bench.compare import compare
from baton.cli.bench.grammars import grammars
from baton.cli.bench.growth import growth
from baton.cli.bench.handover import handover
from baton.cli.bench.perplexity import perplexity
from baton.cli.bench.place import place
from baton.cli.bench.rooms import rooms
from baton.cli.bench.router import router
from baton.cli.bench.serve import serve
from baton.cli.bench.speculation import speculation
from baton.cli.bench.step import step
from baton.cli.bench.transfer import transfer
from baton.cli.bench.turn import turn

bench = typer.Typer(name="bench", help="Measure a part beside its limit; prints JSON.", no_args_is_help=True)
for command in (
    transfer,
    handover,
    choices,
    rooms,
    turn,
    step,
    grammars,
    perplexity,
    agree,
    burst,
    growth,
    speculation,
    serve,
    compare,
    router,
    place,
):
    bench.command()(command)
