"""Does one compiled call compute what the library's definition says, whatever shares the step?

AVX-512 and AMX are emulated where a CPU has AVX2 alone: `emulated/build.py` says how.
"""

import errno
import fcntl
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from _pytest.mark import ParameterSet
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from services.decode.settings import DecodeSettings
from services.engine import compiled as compiled_steps
from services.engine import compiler, proof
from services.engine import engine as engine_module
from services.engine.compiler import AVX2, AVX512, Build, NotCompiled, found
from services.engine.engine import Engine, Row, Sequence, load_engine
from services.engine.proof import gap
from services.engine.sampler import NotANumber
from services.prefill.settings import PrefillSettings
from services.rooms.request import Request, Sampling
from tests.engine import tiny
from tests.engine.emulated.build import emulated
from tests.engine.worker import Worker

SHAPE: Final[dict[str, Any]] = {
    **tiny.SHAPE,
    "hidden_size": 64,
    "intermediate_size": 80,
    "initializer_range": 0.1,
}
MODELS: Final[dict[str, PreTrainedConfig]] = {
    "three queries a head": LlamaConfig(**{**SHAPE, "hidden_size": 96, "head_dim": 64}),
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
"""Of the difference's length, as a share of the length of what is right, in bfloat16."""
EXACT: Final = 1e-5
"""The same in float32."""
SPANS: Final = (
    *((39, 40), (0, 1), (0, 15), (11, 16), (16, 17), (0, 33), (0, 2), (63, 64), (62, 100), (30, 31)),
    *((6, 7), (31, 32), (29, 30), (31, 33), (5, 14)),
)
"""More rows than the kernel multiplies at once, of single tokens, whole prompts, and chunks, to all ends of
pages."""
GREEDY: Final = Sampling(temperature=0.0)

SLIPS: Final = {
    "rotated the other way": ("- other * load(sine + at)", "+ other * load(sine + at)"),
    "its own token is not seen": ("count = s->positions[token] + 1;", "count = s->positions[token] + !row;"),
    "tokens after it are seen": ("s->positions[first + token] + 1, end)", "count, end)"),
    "tokens before it are not seen": ("s->positions[first + token] + 1, end)", "token + 1, end)"),
    "not scaled": ("scaling - top", "1 - top"),
    "the first query for all": ("load(query + of * s->head_dim + at)", "load(query + at)"),
    "the first values for all": ("w->page_stride + begin + from;", "w->page_stride + begin;"),
    "a single token is not scaled": (
        "soften(scores + (query + each) * s->longest, scaling,",
        "soften(scores + (query + each) * s->longest, 1,",
    ),
    "a prompt is not scaled": (
        "soften(scores + token * s->longest, scaling,",
        "soften(scores + token * s->longest, 1,",
    ),
    "one layer's pages for all": ("* m->layers + index) * 2", "* m->layers) * 2"),
    "what was is not added to": (
        "s->gated, m->width, hidden, rows, s->x, 1)",
        "s->gated, m->width, hidden, rows, s->x, 0)",
    ),
    "gates and what they let through": ("exponential(-one)", "exponential(-other)"),
    "one norm for both": ("layer->before_gate, layer->before_gate_epsilon", "layer->before_attention, 1"),
    "one page for all": (
        "score(&asked, keys + table[page] * stride",
        "score(&asked, keys + table[0] * stride",
    ),
    "keys for values": ("value[each] = key[each] + of_one;", "value[each] = key[each];"),
    "not divided": ("1.0f / w->sum[query]", "1.0f"),
    "the first rows' logits": ("s->x + s->keep[place] * hidden", "s->x + place * hidden"),
    "what the first rows saw": ("s->seen + s->keep[place] * of_heads", "s->seen + place * of_heads"),
    "its last token does not look": (
        "s->keep[place] < first + tokens",
        "s->keep[place] < first + tokens - 1",
    ),
    "tokens the other way round": (
        "take(to + PAIR * at + each, value[each]",
        "take(to + PAIR * at + each, value[PAIR - 1 - each]",
    ),
    "halves the other way round": ("low & ~0xffff : low << 16", "low << 16 : low & ~0xffff"),
    "half of a block": (
        "store(to + row * to_stride + LANES, sum[row][1])",
        "store(to + row * to_stride, sum[row][1])",
    ),
    "kept as something else": ("(uints)told >> 16", "(uints)told >> 15"),
    "read as whole numbers": ("(uint32_t)from[at] << 16", "(uint32_t)from[at] << 15"),
    "the upper rows for the lower ones": ("(a) + SIDE_OF_TILE * (stride)", "(a)"),
    "the lower rows' second half": ("_tile_dpbf16ps(3, 5, 7)", "_tile_dpbf16ps(3, 5, 6)"),
    "the end of the depth is left out": ("if (rest) {", "if (0) {"),
    "the end of the rows' depth is their beginning": ("a + row * stride + whole", "a + row * stride"),
    "the lower sums over the upper ones": (
        "_tile_stored(2, to + SIDE_OF_TILE * to_stride,",
        "_tile_stored(2, to,",
    ),
    "tiles of other rows": ("if (set_for == rows) return;", "if (set_for) return;"),
    "a part's rows are the first ones": (
        "multiply_block(blocks, a + row * depth,",
        "multiply_block(blocks, a,",
    ),
}
"""What is changed in the source."""
NO_SLIP: Final = "none"
IN_PARTS: Final = {NO_SLIP, "a part's rows are the first ones"}
"""What is seen where rows are multiplied in parts, as those of long prompts are by AMX."""
NEAR: Final = " NEAR = 1 << 20,"
NEARER: Final = " NEAR = 1 << 12,"
AMX_SLIPS: Final = {
    *("the upper rows for the lower ones", "the lower rows' second half"),
    *("the end of the depth is left out", "the end of the rows' depth is their beginning"),
    *("the lower sums over the upper ones", "tiles of other rows", "a part's rows are the first ones"),
}
KEPT_SLIPS: Final = {"kept as something else", "read as whole numbers"}
OF_BY_BFLOAT16: Final = {
    *("the first query for all", "the first values for all"),
    *("halves the other way round", "half of a block", *KEPT_SLIPS),
}
ELSEWHERE: Final = {
    "in bfloat16 by AMX": OF_BY_BFLOAT16,
    "in bfloat16": {*OF_BY_BFLOAT16, *AMX_SLIPS},
    "in bfloat16 by AVX2": {"tokens the other way round", *AMX_SLIPS},
    "over bfloat16 by AVX2": {"tokens the other way round", *KEPT_SLIPS, *AMX_SLIPS},
}
"""Slips that are in no part of the source that is compiled so."""
BY_AVX512: Final = ELSEWHERE["in bfloat16 by AVX2"] & ELSEWHERE["over bfloat16 by AVX2"]
"""Slips that AVX2 does not show: the only ones that are emulated, since each is compiled anew."""
ALL_BUILDS: Final = compiler.BUILDS
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
)
BUILDS: Final = dict(zip(NAMES, ALL_BUILDS, strict=True))
OF_FLOAT32: Final = [name for name, build in BUILDS.items() if build.numbers is torch.float32]
OF_BFLOAT16: Final = [name for name in BUILDS if name not in OF_FLOAT32]


def known(build: Build) -> bool:
    """This CPU can run it."""
    return all(map(CAPABILITIES.get, build.needs))


def runnable(build: Build) -> Build:
    """It, or an emulation of it."""
    return build if known(build) else emulated(build)


PLAIN: Final = BUILDS["in float32 by AVX2"]
needs_kernel = pytest.mark.skipif(not known(PLAIN), reason="there is no kernel for this CPU")
Directory = Callable[..., Path]


def given(name: str, *more: str) -> ParameterSet:
    """One of `BUILDS`, and what a test is given beside it. Where it is emulated the test has the mark."""
    return pytest.param(name, *more, marks=() if known(BUILDS[name]) else pytest.mark.emulated)


@pytest.fixture(params=map(given, BUILDS))
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """The only one there is."""
    made = runnable(BUILDS[request.param])
    monkeypatch.setattr(compiler, "BUILDS", (made,))
    compiler.kernel.cache_clear()
    yield made
    compiler.kernel.cache_clear()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """Of one of `MODELS`, whose weights are in float32, but numbers of bfloat16 where `weights` are."""
    root = tmp_path_factory.mktemp("compiled")

    def find(name: str, weights: torch.dtype = torch.float32) -> Path:
        place = root / f"{name} {weights}".replace(" ", "-")
        return place if place.exists() else tiny.save(MODELS[name], place, weights)

    return find


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load(
    directory: Path,
    *,
    compiled: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    page_tokens: int = 16,
    threads: int = 1,
) -> Engine:
    return load_engine(
        directory,
        dtype=str(dtype).removeprefix("torch."),
        device="cpu",
        page_tokens=page_tokens,
        kv_cache_memory=2**23,
        threads=threads,
        compiled=compiled,
    )


def load_for(
    build: Build, directory: Directory, name: str, page_tokens: int = 16, threads: int = 1
) -> Engine:
    """An engine whose steps are compiled so."""
    found(build)  # or it says why not
    engine = load(
        directory(name, build.weights), dtype=build.numbers, page_tokens=page_tokens, threads=threads
    )
    assert engine.compiled is not None
    assert engine.compiled._model._weights is build.weights
    return engine


def filled(engine: Engine, spans: tuple[tuple[int, int], ...] = SPANS) -> list[Row]:
    """Rows of these positions, of sequences whose pages lie anywhere; what is before is in the pages, and
    what belongs to nobody is not a number."""
    draw = random.Random(5)
    layout, vocabulary = engine.layout, engine.model.vocab_size
    free = list(range(engine.cache.pages))
    draw.shuffle(free)
    engine.cache.tensor.fill_(float("nan"))
    rows = []
    for index, (start, stop) in enumerate(spans):
        pages = [free.pop() for _ in range(layout.pages_for(stop))]
        prompt = tuple(draw.randrange(vocabulary) for _ in range(stop))
        sequence = Sequence(Request(f"{index}", prompt, 8, sampling=GREEDY), [])
        if start:
            engine.step([Row(sequence, 0, start, pages, sample=False)])
        rows.append(Row(sequence, start, stop, pages, sample=True))
    return rows


def logits_of(engine: Engine, rows: list[Row]) -> torch.Tensor:
    """Those of a step, in float32."""
    with torch.inference_mode():
        for row in rows:
            engine._clear_tail(row)
        logits = engine._logits(rows)
    assert logits is not None
    return logits.float()


def entries(engine: Engine, rows: list[Row]) -> torch.Tensor:
    """The keys and values of the rows' own tokens."""
    return torch.stack(
        [engine.cache.tensor[page, :, :, :, place] for page, place in places(engine, rows)]
    ).float()


def places(engine: Engine, rows: list[Row]) -> list[tuple[int, int]]:
    """Page and place in it of each token."""
    size = engine.layout.page_tokens
    return [(row.pages[each // size], each % size) for row in rows for each in range(row.start, row.stop)]


@needs_kernel
@pytest.mark.parametrize("page_tokens", [4, 16, 64])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("build", map(given, OF_BFLOAT16), indirect=True)
def test_a_step_is_nearer_to_float32_than_the_librarys(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, build: Build, name: str, page_tokens: int
) -> None:
    ours = load_for(build, directory, name, page_tokens)
    monkeypatch.setattr(engine_module, "hasten", lambda *_, **__: None)
    library = load(directory(name), compiled=False, page_tokens=page_tokens)
    assert not library.model.taken_apart
    exact = load(directory(name), compiled=False, dtype=torch.float32, page_tokens=page_tokens)
    with torch.no_grad():  # the numbers that the others have
        for weight in exact.model.weights():
            weight.copy_(weight.bfloat16().float())
    (right, wrote), (librarys, by_library), (own, by_us) = told(exact, library, ours)
    assert gap(own, right) < 1.1 * gap(librarys, right)
    assert gap(own, right) < BOUND
    assert gap(by_us, wrote) < 1.1 * gap(by_library, wrote)
    assert gap(by_us, wrote) < BOUND


@needs_kernel
@pytest.mark.parametrize("page_tokens", [4, 16, 64])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("build", map(given, OF_FLOAT32), indirect=True)
def test_in_float32_a_step_is_the_librarys(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, build: Build, name: str, page_tokens: int
) -> None:
    ours = load_for(build, directory, name, page_tokens)
    monkeypatch.setattr(engine_module, "hasten", lambda *_, **__: None)
    library = load(
        directory(name, build.weights), compiled=False, dtype=torch.float32, page_tokens=page_tokens
    )
    assert not library.model.taken_apart
    (right, wrote), (own, by_us) = told(library, ours)
    assert gap(own, right) < EXACT
    assert gap(by_us, wrote) < EXACT


def told(*engines: Engine) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The logits of a step, and what it writes: of each engine, which go on from the same keys and values."""
    first = min(engines, key=lambda each: each.cache.pages)
    rows = filled(first)
    before = first.cache.tensor.clone()
    found = []
    for engine in engines:
        engine.cache.tensor[: len(before)] = before
        for row in rows:
            row.sequence.tail_page = -1
        found.append((logits_of(engine, rows), entries(engine, rows)))
    return found


@needs_kernel
@pytest.mark.search
@pytest.mark.parametrize(
    ("build", "slip"),
    [
        given(build, slip)
        for build, others in ELSEWHERE.items()
        for slip in (NO_SLIP, *SLIPS)
        if slip not in others and (known(BUILDS[build]) or slip in (NO_SLIP, *BY_AVX512))
    ],
    indirect=["build"],
)
def test_a_slip_in_the_source_is_seen(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Build, slip: str
) -> None:
    """By as much as the tests above let pass; and the source as it is is not."""
    engine = load_for(build, directory, "three queries a head")
    rows = filled(engine)
    right, wrote = logits_of(engine, rows), entries(engine, rows)
    source, (before, after) = compiler.SOURCE.read_text(), SLIPS.get(slip, ("", ""))
    assert before in source
    assert NEAR in source
    slipped = tmp_path / compiler.SOURCE.name
    slipped.write_text(source.replace(before, after).replace(NEAR, NEARER if slip in IN_PARTS else NEAR))
    monkeypatch.setattr(compiler, "SOURCE", slipped)
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-O1"))  # two thirds of the time to compile
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert engine.compiled is not None
    engine.compiled._model._kernel = found(build)
    gaps = gap(logits_of(engine, rows), right), gap(entries(engine, rows), wrote)
    bound = BOUND if build.numbers is torch.bfloat16 else EXACT
    assert (max(gaps) <= bound) is (slip == NO_SLIP)


@needs_kernel
@pytest.mark.parametrize("page_tokens", [4, 16])
@pytest.mark.parametrize("name", MODELS)
def test_what_a_row_gets_does_not_depend_on_its_neighbours_nor_on_threads(
    directory: Directory, threads: None, build: Build, name: str, page_tokens: int
) -> None:
    engine = load_for(build, directory, name, page_tokens)
    rows = filled(engine)
    together = logits_of(engine, rows)
    wrote = entries(engine, rows)
    for count in (1, 2, 3, 5, 6, 9):
        for first in range(0, len(rows), count):
            some = rows[first : first + count]
            assert torch.equal(logits_of(engine, some), together[first : first + count])
    assert torch.equal(logits_of(engine, rows[::-1]), together.flip(0))
    several = load_for(build, directory, name, page_tokens, threads=3)
    several.cache.tensor.copy_(engine.cache.tensor)
    assert torch.equal(logits_of(several, rows), together)
    assert torch.equal(entries(several, rows), wrote)


@needs_kernel
def test_nothing_is_multiplied_that_nobody_wrote(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, build: Build
) -> None:
    """Whatever was in the memory that a step is given."""
    engine = load_for(build, directory, "three queries a head")
    new_empty = torch.Tensor.new_empty

    def logits(stop: int, left: float) -> torch.Tensor:
        def with_what_is_left(*of: Any, **named: Any) -> torch.Tensor:
            return new_empty(*of, **named).fill_(left)

        rows = filled(engine, ((0, stop),))
        monkeypatch.setattr(torch.Tensor, "new_empty", with_what_is_left)
        found = logits_of(engine, rows)
        monkeypatch.undo()
        return found

    for stop in (1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 100):
        assert torch.equal(logits(stop, float("nan")), logits(stop, 0))


@needs_kernel
@pytest.mark.emulated
@pytest.mark.timeout(600)
@pytest.mark.parametrize("planted", [False, True])
def test_a_step_stays_within_its_tensors(directory: Directory, tmp_path: Path, planted: bool) -> None:
    """As AddressSanitizer sees it, which also sees a planted fault. Emulated are the builds in bfloat16: AVX2
    shows other sizes."""
    watched = [str(at) for at, each in enumerate(ALL_BUILDS) if known(each) or each.numbers is torch.bfloat16]
    asked = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, timeout=60, check=True
    )
    library = asked.stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("gcc has no AddressSanitizer here")
    source, end = compiler.SOURCE.read_text(), "count, up_to(count, STRIP))"
    assert end in source
    copy = tmp_path / compiler.SOURCE.name
    copy.write_text(source.replace(end, "count, up_to(count, STRIP) + 512)") if planted else source)
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.engine.sanitized",
            str(copy),
            "-1" if planted else ",".join(watched),
            *(
                str(directory(name, weights))
                for weights in (torch.bfloat16, torch.float32)
                for name in MODELS
            ),
        ],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "LD_PRELOAD": library,
            "ASAN_OPTIONS": "detect_leaks=0",
            "XDG_CACHE_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert ("heap-buffer-overflow" in ended.stderr) is planted, ended.stderr[-4000:]
    assert (ended.returncode == 0) is not planted, ended.stderr[-4000:]


@needs_kernel
def test_a_step_writes_its_own_tokens_keys_and_values_and_nothing_else(
    directory: Directory, build: Build
) -> None:
    engine = load_for(build, directory, "three queries a head")
    rows = filled(engine)
    for row in rows:
        engine._clear_tail(row)
    before = engine.cache.tensor.clone()
    logits_of(engine, rows)
    for page, place in places(engine, rows):
        before[page, :, :, :, place] = engine.cache.tensor[page, :, :, :, place] = 0
    assert torch.equal(before.nan_to_num(7.0), engine.cache.tensor.nan_to_num(7.0))


@needs_kernel
def test_only_the_rows_that_sample_get_logits(directory: Directory, build: Build) -> None:
    engine = load_for(build, directory, "three queries a head")
    rows = filled(engine)
    all_of_them = logits_of(engine, rows)
    some = [Row(r.sequence, r.start, r.stop, r.pages, sample=place % 3 == 1) for place, r in enumerate(rows)]
    assert torch.equal(logits_of(engine, some), all_of_them[1::3])
    none = [Row(row.sequence, row.start, row.stop, row.pages, sample=False) for row in rows]
    assert engine.step(none) == [None] * len(rows)


@needs_kernel
def test_what_is_no_number_in_a_page_is_no_token(directory: Directory, build: Build) -> None:
    engine = load_for(build, directory, "three queries a head")
    rows = filled(engine)
    engine.cache.tensor[rows[0].pages[1], 1, 2, 1, 3, 5] = float("nan")
    drawn = engine.step(rows)
    assert [isinstance(each, NotANumber) for each in drawn] == [True] + [False] * (len(rows) - 1)
    assert not torch.isnan(logits_of(engine, rows[1:])).any()


@needs_kernel
def test_the_pages_are_looked_for_where_they_moved_to(directory: Directory, build: Build) -> None:
    engine = load_for(build, directory, "three queries a head")
    rows = filled(engine)
    before = logits_of(engine, rows)
    engine.cache.move()
    assert torch.equal(logits_of(engine, rows), before)


@needs_kernel
def test_tokens_go_on_while_rows_of_all_kinds_come_and_go(directory: Directory) -> None:
    """The same by calls and by the kernel."""
    lengths = (5, 33, 16, 70)
    draw = random.Random(3)
    prompts = [[draw.randrange(tiny.VOCABULARY) for _ in range(length)] for length in lengths]
    name = "one query a head, biased"

    def outputs(*, compiled: bool) -> list[list[int]]:
        worker = Worker(load(directory(name), dtype=torch.float32, compiled=compiled))
        tenants = [worker.admit(prompt, 24) for prompt in prompts]
        for joined in range(1, len(tenants) + 1):
            for _ in range(4):
                worker.step(tenants[:joined], chunk=20)
        while not all(tenant.done for tenant in tenants):
            worker.step(tenants, chunk=20)
        return [tenant.sequence.output for tenant in tenants]

    told, others = outputs(compiled=True), outputs(compiled=False)
    assert [len(each) for each in told] == [24] * 4
    assert told == others


@needs_kernel
def test_a_prompt_gives_the_same_however_it_is_cut(directory: Directory, build: Build) -> None:
    """Nearly: what a token looks at is summed in another order by one token than by several."""
    engine = load_for(build, directory, "three queries a head")
    whole = logits_of(engine, filled(engine, ((0, 100),)))
    for starts in ((1,), (8,), (33,), (64, 70), (99,)):
        row = filled(engine, ((0, 100),))[0]
        for start, stop in pairwise((0, *starts, 100)):
            last = logits_of(engine, [Row(row.sequence, start, stop, row.pages, sample=stop == 100)])
        assert gap(last, whole) < (BOUND if build.numbers is torch.bfloat16 else EXACT)


@needs_kernel
def test_the_logits_of_all_positions_are_those_of_prompts_that_end_there(
    directory: Directory, build: Build
) -> None:
    engine = load_for(build, directory, "three queries a head")
    [row] = filled(engine, ((0, 33),))
    assert engine.compiled is not None
    with torch.inference_mode():
        everywhere = engine.compiled.logits([row], everywhere=True)
    for stop in range(2, 34):
        cut = Row(row.sequence, 0, stop, row.pages, sample=True)
        assert torch.equal(logits_of(engine, [cut])[0], everywhere[stop - 1])


@needs_kernel
def test_the_proof_looks_at_all_positions(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []

    def listening(ours: torch.Tensor, librarys: torch.Tensor) -> float:
        seen.append(ours.shape)
        return gap(ours, librarys)

    monkeypatch.setattr(proof, "gap", listening)
    assert load(directory("three queries a head"), dtype=torch.float32).compiled is not None
    fed = [sum(stop - start for start, stop in spans) for spans in proof.STEPS]
    assert [shape[0] for shape in seen[: len(fed)]] == fed


@needs_kernel
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("llama-gqa-untied", "a hidden size of 48, which is no multiple of 32"),
        ("gemma-one-kv-head", "an embedding that is a GemmaTextScaledWordEmbedding"),
    ],
)
def test_shapes_that_the_kernel_does_not_know_are_computed_by_calls(
    tiny_dir: Directory, caplog: pytest.LogCaptureFixture, name: str, why: str
) -> None:
    caplog.set_level(logging.INFO)
    engine = load(tiny_dir(name), dtype=torch.float32)
    assert engine.compiled is None
    assert why in str([vars(record)["baton_fields"] for record in caplog.records])
    assert engine.model.taken_apart is (name != "gemma-one-kv-head")
    logits_of(engine, filled(engine))


@needs_kernel
@pytest.mark.parametrize("page_tokens", [1, 6, 17])
def test_pages_that_the_kernel_does_not_know_are_computed_by_calls(
    directory: Directory, page_tokens: int
) -> None:
    engine = load(directory("three queries a head"), dtype=torch.float32, page_tokens=page_tokens)
    assert engine.compiled is None
    logits_of(engine, filled(engine))


@needs_kernel
@pytest.mark.parametrize("shape", [(1, 5, 32), (1, 4, 64), (2, 5, 64)])
def test_rotations_of_another_shape_are_not_read(directory: Directory, shape: tuple[int, ...]) -> None:
    engine = load(directory("three queries a head"), dtype=torch.float32)
    rows = filled(engine, ((0, 5),))
    assert engine.compiled is not None
    engine.compiled._model.rotary = lambda *_: (torch.zeros(shape), torch.zeros(shape))
    with pytest.raises(ValueError, match="rotations of"):
        logits_of(engine, rows)


def test_the_source_and_what_calls_it_know_the_same_sizes() -> None:
    source = compiler.SOURCE.read_text()
    for name in ("STRIP", "HEAD_STRIPS", "SIDE"):
        assert f" {name} = {getattr(compiled_steps, name)}," in source
    lanes = re.findall(r"#define LANES (\d+)", source)
    assert {2 * int(each) for each in lanes} == {build.block for build in ALL_BUILDS}
    assert max(map(int, lanes)) == compiled_steps.HALF
    rows = {int(each) for each in re.findall(r"#define ROWS (\d+)", source)}
    assert {build.rows for build in ALL_BUILDS} <= rows
    assert max(rows) == max(build.rows for build in ALL_BUILDS)


@needs_kernel
def test_a_kernel_that_gives_something_else_is_not_used_and_the_log_says_so(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        engine_module, "compiled_kernel", lambda *of: replace(compiler.kernel(*of), step=lambda *_: None)
    )
    engine = load(directory("three queries a head"), dtype=torch.float32)
    assert engine.compiled is None
    assert engine.model.taken_apart
    assert [record.getMessage() for record in caplog.records] == ["steps are not compiled"]
    logits_of(engine, filled(engine))


def test_it_is_for_workers_that_do_not_refuse_it(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DecodeSettings().compiled_steps
    assert PrefillSettings().compiled_steps
    monkeypatch.setattr(engine_module, "compiled_kernel", lambda *_: pytest.fail("it was asked for"))
    assert load(directory("three queries a head"), compiled=False).compiled is None


@needs_kernel
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
def test_in_float32_weights_are_kept_in_half_the_bytes_where_nothing_is_lost(
    directory: Directory, weights: torch.dtype
) -> None:
    name = "three queries a head"
    before = load(directory(name, weights), compiled=False, dtype=torch.float32).model.weight_bytes
    engine = load(directory(name, weights), dtype=torch.float32)
    assert engine.compiled is not None
    assert engine.compiled._model._weights is weights
    assert engine.model.weight_bytes == pytest.approx(before * weights.itemsize / 4, rel=0.05)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where kernels will be kept. None is loaded, nor compiled ahead."""
    source = tmp_path / compiler.SOURCE.name
    source.write_bytes(compiler.SOURCE.read_bytes())
    monkeypatch.setattr(compiler, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler.kernel.cache_clear()
    yield tmp_path / "baton" / "kernels"
    compiler.kernel.cache_clear()


@pytest.mark.parametrize(
    ("told", "numbers"),
    [
        ({}, torch.float32),
        ({"avx2": True}, torch.float32),
        ({"avx2": True}, torch.bfloat16),
        (dict.fromkeys((*AVX512, "avx512_bf16"), True), torch.float16),
    ],
)
def test_there_is_none_for_other_cpus(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, bool], numbers: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told)
    with pytest.raises(NotCompiled, match="this CPU"):
        compiler.kernel(numbers, torch.bfloat16)
    assert not empty_cache.exists()


@needs_kernel
def test_the_widest_instructions_of_a_cpu_are_used(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Build] = []
    monkeypatch.setattr(compiler, "found", asked.append)
    for told in (CAPABILITIES, {"avx2": True, "fma3": True}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda told=told: told)
        compiler.kernel(torch.float32, torch.float32)
        compiler.kernel.cache_clear()
    wide = known(BUILDS["in float32"])
    assert asked == [
        BUILDS["in float32" if wide else "in float32 by AVX2"],
        BUILDS["in float32 by AVX2"],
    ]


@needs_kernel
def test_amx_is_used_where_linux_lets_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked here, whatever the CPU is said to know."""
    caplog.set_level(logging.INFO)
    amx, without = BUILDS["in bfloat16 by AMX"], BUILDS["in bfloat16"]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(amx.needs, True))
    monkeypatch.setattr(compiler, "found", lambda build: build)
    compiler.kernel.cache_clear()
    chosen = amx if known(amx) else without
    assert compiler.kernel(torch.bfloat16, torch.bfloat16).step is chosen
    assert compiler.kernel(torch.bfloat16, torch.bfloat16).rows == chosen.rows
    said = [vars(record)["baton_fields"]["why"] for record in caplog.records]
    assert [each.startswith("no use of AMX is allowed") for each in said] == [True] * (chosen is without)
    compiler.kernel.cache_clear()


@needs_kernel
def test_where_the_best_cannot_be_compiled_the_next_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys((*AVX512, *AVX2), True))
    best, next_one = BUILDS["in float32"], BUILDS["in float32 by AVX2"]

    def only_next(build: Build) -> str:
        if build is best:
            raise NotCompiled("no such instruction")
        assert build is next_one
        return "the next one"

    def neither(build: Build) -> str:
        raise NotCompiled("no such instruction" if build is best else "out of space")

    compiler.kernel.cache_clear()
    monkeypatch.setattr(compiler, "found", only_next)
    assert compiler.kernel(torch.float32, torch.float32).step == "the next one"
    compiler.kernel.cache_clear()
    monkeypatch.setattr(compiler, "found", neither)
    with pytest.raises(NotCompiled, match="no such instruction"):
        compiler.kernel(torch.float32, torch.float32)


def test_weights_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_steps, "ROWS_A_LOOK", 2)
    linear = torch.nn.Linear(3, 5, bias=False)
    linear.weight.data = torch.ones(5, 3)
    assert compiled_steps.narrow([linear])
    linear.weight.data[4, 2] = 1 + 2**-10
    assert not compiled_steps.narrow([linear])


@needs_kernel
def test_it_is_compiled_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(PLAIN) is not None
    [library] = empty_cache.iterdir()
    made = library.stat().st_mtime_ns
    monkeypatch.setattr(compiler, "COMPILERS", ())
    assert found(PLAIN) is not None
    assert library.stat().st_mtime_ns == made
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-g"))
    with pytest.raises(NotCompiled, match="there is no C compiler"):
        found(PLAIN)


@needs_kernel
def test_who_finds_another_process_compiling_takes_what_that_makes(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the workers of a first start do, each with two cores to compile on."""
    found(PLAIN)
    [library] = empty_cache.iterdir()
    aside = library.rename(empty_cache.parent / library.name)
    other = os.open(empty_cache, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    waits = []

    def it_ends(_: float) -> None:
        waits.append(aside.rename(library))
        os.close(other)

    monkeypatch.setattr(compiler, "sleep", it_ends)
    monkeypatch.setattr(compiler, "COMPILERS", ())
    assert found(PLAIN) is not None
    assert waits == [library]


@needs_kernel
def test_nobody_waits_for_ever_for_another_that_compiles(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_cache.mkdir(parents=True, mode=0o700)
    other = os.open(empty_cache, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    monkeypatch.setattr(compiler, "WAIT_S", 0.0)
    assert found(PLAIN) is not None
    os.close(other)


@needs_kernel
def test_what_was_cut_short_is_compiled_anew(empty_cache: Path) -> None:
    found(PLAIN)
    [library] = empty_cache.iterdir()
    whole = library.read_bytes()
    library.unlink()
    library.write_bytes(whole[:100])
    assert found(PLAIN) is not None
    assert library.stat().st_size == len(whole)


@needs_kernel
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_the_compiler_has_nothing_to_say(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, build: Build
) -> None:
    """Whatever this CPU knows: nothing is emulated, nor called."""
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-Wall", "-Wextra", "-Werror"))
    assert found(build) is not None


@needs_kernel
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("COMPILERS", ("no-such-compiler",), "there is no C compiler (no-such-compiler)"),
        ("COMPILERS", ("false",), "exit 1"),
        ("FLAGS", ("-no-such-flag",), "no-such-flag"),
        ("FUNCTION", "no_such_function", "no_such_function"),
        ("DEADLINE_S", 0.0, "took more than 0 s"),
        ("SOURCE", Path("/nowhere/step.c"), "FileNotFoundError"),
    ],
)
def test_what_cannot_be_compiled_is_said_and_steps_go_by_calls(
    directory: Directory,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: Any,
    why: str,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(compiler, name, value)
    engine = load(directory("three queries a head"), dtype=torch.float32)
    assert engine.compiled is None
    assert [record.getMessage() for record in caplog.records] == ["steps are not compiled"]
    assert why in vars(caplog.records[0])["baton_fields"]["why"]
    assert not empty_cache.exists() or not [*empty_cache.iterdir()]
    logits_of(engine, filled(engine))


@needs_kernel
def test_a_cache_that_cannot_be_used_is_said(empty_cache: Path) -> None:
    empty_cache.parent.mkdir()
    empty_cache.write_text("")
    with pytest.raises(NotCompiled, match="FileExistsError"):
        found(PLAIN)


@needs_kernel
def test_what_cannot_be_kept_leaves_nothing_behind(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk each start would leave as much again."""

    def full(*_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(NotCompiled, match="No space left"):
        found(PLAIN)
    assert not [*empty_cache.iterdir()]


@needs_kernel
def test_nothing_is_loaded_from_where_others_may_write(empty_cache: Path) -> None:
    found(PLAIN)
    empty_cache.chmod(0o777)
    with pytest.raises(NotCompiled, match="is not this user's alone"):
        found(PLAIN)


@needs_kernel
def test_it_can_be_compiled_ahead_beside_its_source(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(PLAIN)
    [library] = empty_cache.iterdir()
    library.rename(compiler.SOURCE.with_name(library.name))
    empty_cache.rmdir()
    monkeypatch.setattr(compiler, "COMPILERS", ())
    assert found(PLAIN) is not None
    assert not empty_cache.exists()
