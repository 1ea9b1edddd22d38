"""Perplexity of a fixed text with quantized weights, beside plain weights.

Perplexity is e to the mean negative log-likelihood of each token after those before it. All variants
compute the same tokens in one run.
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from baton.runtime.errors import StartupError
from baton.runtime.model_options import Quantize

if TYPE_CHECKING:
    from baton.engine.torch_engine import TorchEngine

PASSAGE: Final = Path(__file__).with_name("passage.txt")
CHUNK: Final = 128
"""Most tokens of one step."""


def perplexity(
    model: Annotated[str, typer.Option(help="A model directory, a GGUF file, or the word demo.")] = "demo",
    quantize: Annotated[
        list[Quantize] | None, typer.Option(help="Ways to keep weights, beside none. May be repeated.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A file of UTF-8; else a story."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 1,
) -> None:
    """Perplexity of a text by plain weights and by quantized ones (default: int8 and int4)."""
    from baton.api.text.tokenizer import load_tokenizer
    from baton.engine.loading.engine_loading import load_engine
    from baton.engine.quantization.weight_quantization import weight_quantization
    from baton.models.model_facts import read_model
    from baton.models.model_files import prepare, resolve

    source = resolve(model)
    directory = prepare(source, lambda _: None)
    words = (text or PASSAGE).read_text("utf-8")
    tokens = load_tokenizer(directory).encode(words, add_special_tokens=False)
    tokens = tokens[: read_model(directory).context_length - 1]
    if len(tokens) < 2:
        raise StartupError(
            f"--text {text or PASSAGE}: {len(tokens)} tokens to this model, of which none follows one"
        )
    told: dict[str, float] = {}
    for how in dict.fromkeys((Quantize.NONE, *(quantize or (Quantize.INT8, Quantize.INT4)))):
        engine = load_engine(
            directory,
            dtype=dtype,
            device="cpu",
            quantization=weight_quantization(how, source, multiplied=True),
            kv_cache_memory=2**30,
            tokens_min=len(tokens),
            threads=threads,
            compiled=True,
        )
        told[how.value] = _perplexity(engine, tokens)
    plain = told[Quantize.NONE.value]
    body = {
        "benchmark": "perplexity",
        "model": engine.model.facts.name,
        "dtype": engine.cache.group.dtype,
        "tokens": len(tokens),
        "perplexity": {how: round(value, 4) for how, value in told.items()},
        "ratio": {how: round(value / plain, 4) for how, value in told.items()},
        "ratio_of": ["perplexity", Quantize.NONE.value],
    }
    print(json.dumps(body))


def _perplexity(engine: "TorchEngine", tokens: list[int]) -> float:
    """Return the perplexity over all tokens but the first."""
    from baton.engine_interface import PromptScores, Row, Sequence
    from baton.rooms.request import Request

    sequence = Sequence(Request("perplexity", tuple(tokens), max_tokens=1, prompt_logprobs=0), [])
    scores = sequence.scores = PromptScores()
    pages, chunk = range(engine.cache.group.pages_for(len(tokens))), min(CHUNK, engine.scored_max)
    for start in range(0, len(tokens) - 1, chunk):
        stop = min(start + chunk, len(tokens) - 1)
        engine.step([Row(sequence, start, stop, (pages,), sample=False)])
    return math.exp(-math.fsum(each.logprob for each in scores.values) / len(scores.values))
