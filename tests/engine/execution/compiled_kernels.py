"""Builds of the compiled step, models and rows for its tests.

A build that this CPU knows is asked as it is, by `make test`. AVX-512 and AMX are emulated besides, by `make
verify`, whatever the CPU knows: `emulated/build.py` says how.
"""

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequenced
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from _pytest.mark import ParameterSet
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from baton.engine.execution import step_compiler
from baton.engine.execution.step_compiler import AVX512, CODES, Build, load_or_compile
from baton.engine.loading.engine_loading import load_engine
from baton.engine.quantization.weight_quantization import WeightQuantization
from baton.engine.torch_engine import TorchEngine
from baton.engine_interface import Row, Sequence
from baton.rooms.request import Request, Sampling
from baton.runtime.model_options import Quantize
from tests.engine import tiny_models
from tests.engine.execution.emulated.build import emulated
from tests.engine.executions import compiled_model, is_compiled
from tests.pairwise import cover, every

SHAPE: Final[dict[str, Any]] = {
    **tiny_models.SHAPE,
    "hidden_size": 64,
    "intermediate_size": 80,
    "initializer_range": 0.1,
}
MODELS: Final[dict[str, PreTrainedConfig]] = {
    "three queries a head": MistralConfig(**{**SHAPE, "hidden_size": 96, "head_dim": 64}, sliding_window=40),
    "one query a head, biased": Qwen2Config(
        **{**SHAPE, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    ),
    "five queries a head of odd width, normed": Qwen3Config(
        **{**SHAPE, "hidden_size": 160, "num_attention_heads": 10, "head_dim": 96}, tie_word_embeddings=False
    ),
    "eight queries a head, all biased": LlamaConfig(
        **{**SHAPE, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 129},
        attention_bias=True,
        mlp_bias=True,
    ),
}
BOUND: Final = 0.02
"""Largest relative difference in bfloat16."""
EXACT: Final = 1e-5
"""Largest relative difference in float32."""
SPANS: Final = (
    *((39, 40), (0, 1), (0, 15), (11, 16), (16, 17), (0, 33), (0, 2), (63, 64), (62, 100), (30, 31)),
    *((6, 7), (31, 32), (29, 30), (31, 33), (5, 14), (90, 91)),
)
"""Positions of more rows than the kernel multiplies at once: single tokens, whole prompts and chunks. They
end anywhere in a page, within a window and behind it."""
GREEDY: Final = Sampling(temperature=0.0)
CAPABILITIES: Final = torch.cpu.get_capabilities()
NAMES: Final = (
    "in bfloat16 by AMX",
    "in bfloat16",
    "in bfloat16 by products in float32",
    "in bfloat16 by AVX2",
    "over bfloat16",
    "over bfloat16 by AVX2",
    "in float32",
    "in float32 by AVX2",
    "of codes in bfloat16",
    "of codes in bfloat16 by AVX2",
    "of codes in float32",
    "of codes in float32 by AVX2",
)
BUILDS: Final = dict(zip(NAMES, step_compiler.BUILDS, strict=True))
EMULATED: Final = {
    f"{name}, emulated": emulated(build) for name, build in BUILDS.items() if set(AVX512) <= set(build.needs)
}
KERNELS: Final = {**BUILDS, **EMULATED}


def known(build: Build) -> bool:
    """Return whether this CPU can run the build."""
    return all(map(CAPABILITIES.get, build.needs))


PLAIN: Final = BUILDS["in float32 by AVX2"]
needs_kernel = pytest.mark.skipif(not known(PLAIN), reason="there is no kernel for this CPU")
Directory = Callable[..., Path]


def asked(numbers: torch.dtype | None = None) -> list[ParameterSet]:
    """Return parameters: names of the builds to test, of all `numbers` or of these."""
    return [pytest.param(name, marks=_marks(name)) for name in _names(numbers)]


def combined(pages: Sequenced[int], numbers: torch.dtype | None = None) -> list[ParameterSet]:
    """Return parameters: model, tokens of a page, and build. Emulated builds get a cover of all pairs."""
    native, emulations = (
        every(
            {
                "name": list(MODELS),
                "page_tokens": pages,
                "build": [name for name in _names(numbers) if (name in EMULATED) is among],
            }
        )
        for among in (False, True)
    )
    cases = [*native, *cover(emulations)]
    return [
        pytest.param(*case.values(), marks=_marks(case["build"]), id="-".join(map(str, case.values())))
        for case in cases
    ]


def _names(numbers: torch.dtype | None) -> Iterator[str]:
    for name, build in KERNELS.items():
        if numbers in (None, build.numbers) and (known(build) or build is PLAIN):
            yield name


def _marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.emulated,) if name in EMULATED else ()


def load(
    directory: Path,
    *,
    compiled: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    page_tokens: int = 16,
    threads: int = 1,
    quantization: WeightQuantization | None = None,
) -> TorchEngine:
    return load_engine(
        directory,
        dtype=str(dtype).removeprefix("torch."),
        device="cpu",
        page_tokens=page_tokens,
        kv_cache_memory=2**23,
        threads=threads,
        compiled=compiled,
        quantization=quantization,
    )


def stored_for(build: Build) -> torch.dtype:
    """Return the dtype whose values the weights in a file have."""
    return build.numbers if build.weights is CODES else build.weights


def coding_for(build: Build, *, multiplied: bool = True) -> WeightQuantization | None:
    """Return the quantization of a build with codes: 4 bits, and 8 for the head."""
    return WeightQuantization(Quantize.INT4, multiplied=multiplied) if build.weights is CODES else None


def load_for(
    build: Build, directory: Directory, name: str, page_tokens: int = 16, threads: int = 1
) -> TorchEngine:
    """Return an engine whose steps are compiled by that build."""
    load_or_compile(build)  # or it says why not
    engine = load(
        directory(name, stored_for(build)),
        dtype=build.numbers,
        page_tokens=page_tokens,
        threads=threads,
        quantization=coding_for(build),
    )
    assert is_compiled(engine)
    assert compiled_model(engine).weights is build.weights
    return engine


def filled(engine: TorchEngine, spans: tuple[tuple[int, int], ...] = SPANS) -> list[Row]:
    """Return rows of these positions in scattered pages. Earlier tokens are computed, and free pages hold
    NaN."""
    draw = random.Random(5)
    kv, vocabulary = engine.cache.group, engine.model.vocab_size
    free = list(range(engine.cache.pages))
    draw.shuffle(free)
    engine.cache.tensor.fill_(float("nan"))
    rows = []
    for index, (start, stop) in enumerate(spans):
        pages = [free.pop() for _ in range(kv.pages_for(stop))]
        prompt = tuple(draw.randrange(vocabulary) for _ in range(stop))
        sequence = Sequence(Request(f"{index}", prompt, 8, sampling=GREEDY), [])
        if start:
            engine.step([Row(sequence, 0, start, (pages,), sample=False)])
        rows.append(Row(sequence, start, stop, (pages,), sample=True))
    return rows


def logits_of(engine: TorchEngine, rows: list[Row]) -> torch.Tensor:
    """Return the logits of a step, in float32."""
    with torch.inference_mode():
        for row in rows:
            engine.clear_tail(row)
        logits = engine.runner.logits(rows)
    assert logits is not None
    return logits.float()


def entries(engine: TorchEngine, rows: list[Row]) -> torch.Tensor:
    """Return the keys and values of the rows' own tokens."""
    return torch.stack(
        [engine.cache.tensor[page, :, :, :, place] for page, place in places(engine, rows)]
    ).float()


def places(engine: TorchEngine, rows: list[Row]) -> list[tuple[int, int]]:
    """Return the page and the offset in it of each token."""
    size = engine.cache.group.page_tokens
    return [(row.pages[each // size], each % size) for row in rows for each in range(row.start, row.stop)]


def told(*engines: TorchEngine) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the logits of a step and what it writes, for each engine. All start from the same keys and
    values."""
    first = min(engines, key=lambda each: each.cache.pages)
    rows = filled(first)
    before = first.cache.tensor.clone()
    found = []
    for engine in engines:
        engine.cache.tensor[: len(before)] = before
        for row in rows:
            row.sequence.engine_state = row.sequence.sampler_state = None
        found.append((logits_of(engine, rows), entries(engine, rows)))
    return found
