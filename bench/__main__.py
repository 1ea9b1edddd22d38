"""Benchmarks, each of a part of Baton beside its limit, measured in one run in turns.

    transfer    pages as prefill pushes them, beside bare NIXL writes of as many bytes and memcpy
    handover    one request's time by stage, and what its hand-over costs beside the transfer
    choices     several answers to one prompt beside one: bytes sent, time to the first token
    rooms       rooms from opened to retired with a toy engine, beside bare gRPC calls
    turn        a worker's turn that holds many rooms, beside a plain pass over them
    step        a decode step beside reading weights and KV once, a prefill beside its products
    grammars    an event loop's longest gap while grammars are compiled, beside one at rest
    perplexity  a text's perplexity with quantized weights, beside plain ones
    agree       a turn's agreement of 1, 2 and 3 ranks, beside gloo's all-reduce of the same bytes
    router      the bootstrap on one core before workers that answer at once
    place       a placement before many workers beside few, and with many rooms open
    burst       many requests at once, and a steady flow: what was answered, what failed
    conversations prompt tokens that prefix caches spare, with several bootstraps beside one
    growth      chats without an end on a cache that does not hold all, beside one that does
    speculation answers with drafts of what comes next, beside the same without
    compare     Baton and other systems under the same load, in turns
    trace       a recorded trace as JSON lines that aiperf replays

Each prints one JSON object with the medians and their ratio. Absolute times are the machine's; quote ratios.
What takes long to load is imported by the command that needs it.
"""

import typer

from bench.engine.grammars import grammars
from bench.engine.perplexity import perplexity
from bench.engine.speculation import speculation
from bench.engine.step import step
from bench.pages.transfer import transfer
from bench.rooms.choices import choices
from bench.rooms.handover import handover
from bench.rooms.rooms import rooms
from bench.router.place import place
from bench.router.router import router
from bench.serving.burst import burst
from bench.serving.compare import compare
from bench.serving.conversations import conversations
from bench.serving.growth import growth
from bench.serving.trace import trace
from bench.workers.agree import agree
from bench.workers.turn import turn

app = typer.Typer(
    name="bench",
    help="Measure a part beside its limit; prints JSON.",
    no_args_is_help=True,
    add_completion=False,
)
for command in (transfer, handover, choices, rooms, turn, step, grammars, perplexity, agree):
    app.command()(command)
app.command()(burst)
app.command()(conversations)
app.command()(growth)
app.command()(speculation)
app.command()(compare)
app.command()(router)
app.command()(place)
app.command()(trace)

if __name__ == "__main__":
    app(prog_name="python -m bench")
