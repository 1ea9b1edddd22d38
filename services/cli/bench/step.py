"""How far is a decode step from the time that reading the weights takes?"""

from typing import Annotated

import typer

from services.cli.bench.report import Runs, seconds_of, tell


def step(
    runs: Runs = 15,
    model: Annotated[str, typer.Option(help="A model directory, a GGUF file, or the word demo.")] = "demo",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    batch: Annotated[int, typer.Option(min=1, max=256, help="Sequences in the step.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")] = 512,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 1,
) -> None:
    """One decode step, beside reading every weight once."""
    import torch

    from services.engine.engine import Row, Sequence, load_engine
    from services.rooms.request import Request, Sampling
    from services.runtime.model_files import prepare, resolve

    directory = prepare(resolve(model), lambda _: None)
    engine = load_engine(directory, dtype=dtype, device="cpu", kv_cache_memory=2**30, threads=threads)
    greedy = Sampling(temperature=0.0)
    sequences = [
        Sequence(Request(f"bench-{index}", (7,) * context, max_tokens=2, sampling=greedy), [7])
        for index in range(batch)
    ]
    pages = engine.layout.pages_for(context + 1)
    tables = [list(range(index * pages, (index + 1) * pages)) for index in range(batch)]
    for sequence, table in zip(sequences, tables, strict=True):
        engine.step([Row(sequence, 0, context, table, sample=False)])
    rows = [
        Row(sequence, context, context + 1, table, sample=True)
        for sequence, table in zip(sequences, tables, strict=True)
    ]
    weights = engine.model.weights()

    def read() -> None:
        for weight in weights:
            torch.sum(weight.view(-1).view(torch.float32))

    engine.step(rows)
    seconds: dict[str, list[float]] = {"step": [], "read_weights": []}
    for _ in range(runs):
        seconds["step"].append(seconds_of(lambda: engine.step(rows)))
        seconds["read_weights"].append(seconds_of(read))
    size = sum(each.numel() * each.element_size() for each in weights)
    facts: dict[str, object] = {"batch": batch, "context": context, "dtype": dtype, "weight_bytes": size}
    tell("step", seconds, "read_weights", facts)
