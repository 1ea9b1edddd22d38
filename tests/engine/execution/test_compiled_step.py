"""Tests that the compiled step computes what the library's definition does, whatever shares the step.

`kernels.py` says which builds are asked. Whether these tests would see a fault is in `test_kernel_faults.py`.
"""

import logging
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.decode.settings import DecodeSettings
from baton.engine.execution import compiled_step as compiled_steps
from baton.engine.execution import step_compiler
from baton.engine.execution.agreement import relative_difference
from baton.engine.execution.step_compiler import Build
from baton.engine.loading import engine_loading as engine_module
from baton.engine.loading import runner_selection
from baton.engine.loading.runner_selection import library_execution
from baton.engine.quantization.weight_quantization import WeightQuantization
from baton.engine.torch_engine import TorchEngine
from baton.engine_interface import LogitsNotFinite, PromptScores, Row
from baton.prefill.settings import PrefillSettings
from baton.runtime.model_options import Quantize
from tests.engine import tiny_models
from tests.engine.execution.compiled_kernels import (
    BOUND,
    BUILDS,
    EXACT,
    Directory,
    coding_for,
    combined,
    entries,
    filled,
    load,
    load_for,
    logits_of,
    needs_kernel,
    places,
    stored_for,
    told,
)
from tests.engine.executions import compiled_model, compiled_runner, is_compiled, is_ours
from tests.inference.engine_worker import ShuffledWorker


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


TRIED = ("name", "page_tokens", "build")


@lru_cache(maxsize=2)
def librarys(
    directory: Path,
    page_tokens: int,
    dtype: torch.dtype,
    *,
    narrow: bool = False,
    quantization: WeightQuantization | None = None,
) -> TorchEngine:
    """Return an engine that the library computes, with which all builds of a model are compared.

    `narrow`: weights have values of bfloat16. `quantization`: weights are what codes stand for.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "select_execution", lambda model, *_: library_execution(model))
        engine = load(
            directory, compiled=False, dtype=dtype, page_tokens=page_tokens, quantization=quantization
        )
    assert not is_ours(engine)
    if narrow:
        with torch.no_grad():
            for weight in engine.model.weights():
                weight.copy_(weight.bfloat16().float())
    return engine


@needs_kernel
@pytest.mark.parametrize(TRIED, combined((4, 16, 64), torch.bfloat16), indirect=["build"])
def test_a_step_is_nearer_to_float32_than_the_librarys(
    directory: Directory, build: Build, name: str, page_tokens: int
) -> None:
    ours = load_for(build, directory, name, page_tokens)
    quantization, stored = coding_for(build, multiplied=False), directory(name, stored_for(build))
    library = librarys(stored, page_tokens, torch.bfloat16, quantization=quantization)
    exact = librarys(
        stored, page_tokens, torch.float32, narrow=quantization is None, quantization=quantization
    )
    (right, wrote), (by_calls, by_library), (own, by_us) = told(exact, library, ours)
    assert relative_difference(own, right) < 1.1 * relative_difference(by_calls, right)
    assert relative_difference(own, right) < BOUND
    assert relative_difference(by_us, wrote) < 1.1 * relative_difference(by_library, wrote)
    assert relative_difference(by_us, wrote) < BOUND


@needs_kernel
@pytest.mark.parametrize(TRIED, combined((4, 16, 64), torch.float32), indirect=["build"])
def test_in_float32_a_step_is_the_librarys(
    directory: Directory, build: Build, name: str, page_tokens: int
) -> None:
    ours = load_for(build, directory, name, page_tokens)
    quantization = coding_for(build, multiplied=False)
    library = librarys(
        directory(name, stored_for(build)), page_tokens, torch.float32, quantization=quantization
    )
    (right, wrote), (own, by_us) = told(library, ours)
    assert relative_difference(own, right) < EXACT
    assert relative_difference(by_us, wrote) < EXACT


@needs_kernel
@pytest.mark.parametrize(TRIED, combined((4, 16)), indirect=["build"])
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
    """The test covers any content of the memory that a step is given."""
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
def test_a_step_writes_its_own_tokens_keys_and_values_and_nothing_else(
    directory: Directory, build: Build
) -> None:
    engine = load_for(build, directory, "three queries a head")
    rows = filled(engine)
    for row in rows:
        engine.clear_tail(row)
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
    some = [
        Row(r.sequence, r.start, r.stop, (r.pages,), sample=place % 3 == 1) for place, r in enumerate(rows)
    ]
    assert torch.equal(logits_of(engine, some), all_of_them[1::3])
    none = [Row(row.sequence, row.start, row.stop, (row.pages,), sample=False) for row in rows]
    assert engine.step(none) == [()] * len(rows)


@needs_kernel
def test_what_is_no_number_in_a_page_is_no_token(directory: Directory, build: Build) -> None:
    engine = load_for(build, directory, "three queries a head")
    rows = filled(engine)
    engine.cache.tensor[rows[0].pages[1], 1, 2, 1, 3, 5] = float("nan")
    drawn = engine.step(rows)
    assert [isinstance(each, LogitsNotFinite) for each in drawn] == [True] + [False] * (len(rows) - 1)
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
    """The tokens are the same by separate calls and by the kernel."""
    lengths = (5, 33, 16, 70)
    draw = random.Random(3)
    prompts = [[draw.randrange(tiny_models.VOCABULARY) for _ in range(length)] for length in lengths]
    name = "one query a head, biased"

    def outputs(*, compiled: bool) -> list[list[int]]:
        worker = ShuffledWorker(load(directory(name), dtype=torch.float32, compiled=compiled))
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
@pytest.mark.parametrize(TRIED, combined((4, 16)), indirect=["build"])
def test_a_prompt_gives_the_same_however_it_is_cut(
    directory: Directory, build: Build, name: str, page_tokens: int
) -> None:
    """Logits and pages are equal bit for bit: by one step, by chunks, or token by token as decode runs."""
    engine = load_for(build, directory, name, page_tokens)
    [row] = filled(engine, ((0, 100),))
    whole, wrote = logits_of(engine, [row]), entries(engine, [row])
    for starts in ((1,), (8,), (33,), (64, 70), (99,), range(1, 100)):
        engine.cache.tensor.fill_(float("nan"))
        for start, stop in pairwise((0, *starts, 100)):
            last = logits_of(engine, [Row(row.sequence, start, stop, (row.pages,), sample=stop == 100)])
        assert torch.equal(last, whole)
        assert torch.equal(entries(engine, [row]), wrote)


@needs_kernel
def test_the_logits_of_all_positions_are_those_of_prompts_that_end_there(
    directory: Directory, build: Build
) -> None:
    engine = load_for(build, directory, "three queries a head")
    [row] = filled(engine, ((0, 33),))
    with torch.inference_mode():
        everywhere = compiled_runner(engine).logits_at([row], everywhere=True)
    for stop in range(2, 34):
        cut = Row(row.sequence, 0, stop, (row.pages,), sample=True)
        assert torch.equal(logits_of(engine, [cut])[0], everywhere[stop - 1])


@needs_kernel
def test_the_scores_of_all_positions_are_the_same_by_calls(directory: Directory) -> None:
    for how in (None, WeightQuantization(Quantize.INT4, multiplied=False)):
        found = []
        for compiled in (True, False):
            engine = load(
                directory("one query a head, biased"),
                dtype=torch.float32,
                compiled=compiled,
                quantization=how,
            )
            [row] = filled(engine, ((0, 40),))
            row.sequence.request = replace(row.sequence.request, prompt_logprobs=3)
            scores = row.sequence.scores = PromptScores()
            engine.step([row])
            found.append(scores.values)
        assert len(found[0]) == 39
        for ours, theirs in zip(*found, strict=True):
            assert ours.rank == theirs.rank
            assert [each for each, _ in ours.top] == [each for each, _ in theirs.top]
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@needs_kernel
def test_the_proof_looks_at_all_positions(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []

    def listening(ours: torch.Tensor, librarys: torch.Tensor) -> float:
        seen.append(ours.shape)
        return relative_difference(ours, librarys)

    monkeypatch.setattr(runner_selection, "relative_difference", listening)
    assert is_compiled(load(directory("three queries a head"), dtype=torch.float32))
    fed = [sum(stop - start for start, stop in spans) for spans in runner_selection.STEPS]
    fed[0] += runner_selection.MORE  # behind the model's windows, too
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
    assert not is_compiled(engine)
    assert why in str([vars(record)["baton_fields"] for record in caplog.records])
    assert is_ours(engine) is (name != "gemma-one-kv-head")
    logits_of(engine, filled(engine))


@needs_kernel
@pytest.mark.parametrize("page_tokens", [1, 6, 17])
def test_pages_that_the_kernel_does_not_know_are_computed_by_calls(
    directory: Directory, page_tokens: int
) -> None:
    engine = load(directory("three queries a head"), dtype=torch.float32, page_tokens=page_tokens)
    assert not is_compiled(engine)
    logits_of(engine, filled(engine))


@needs_kernel
@pytest.mark.parametrize("shape", [(1, 5, 32), (1, 4, 64), (2, 5, 64)])
def test_rotations_of_another_shape_are_not_read(directory: Directory, shape: tuple[int, ...]) -> None:
    engine = load(directory("three queries a head"), dtype=torch.float32)
    rows = filled(engine, ((0, 5),))
    assert is_compiled(engine)
    compiled_model(engine).rotary = lambda *_: (torch.zeros(shape), torch.zeros(shape))
    with pytest.raises(ValueError, match="rotations of"):
        logits_of(engine, rows)


def test_the_source_and_what_calls_it_know_the_same_sizes() -> None:
    source = step_compiler.SOURCE.read_text()
    for name in ("STRIP", "HEAD_STRIPS", "SIDE"):
        assert f" {name} = {getattr(compiled_steps, name)}," in source
    lanes = re.findall(r"#define LANES (\d+)", source)
    assert {2 * int(each) for each in lanes} == {build.block for build in BUILDS.values()}
    assert max(map(int, lanes)) == compiled_steps.HALF
    rows = {int(each) for each in re.findall(r"#define ROWS (\d+)", source)}
    assert {build.rows for build in BUILDS.values()} <= rows
    assert max(rows) == max(build.rows for build in BUILDS.values())


@needs_kernel
def test_a_kernel_that_gives_something_else_is_not_used_and_the_log_says_so(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        engine_module, "compiled_kernel", lambda *of: replace(step_compiler.kernel(*of), step=lambda *_: None)
    )
    engine = load(directory("three queries a head"), dtype=torch.float32)
    assert not is_compiled(engine)
    assert is_ours(engine)
    assert [record.getMessage() for record in caplog.records] == ["steps are not compiled"]
    logits_of(engine, filled(engine))


def test_it_is_for_workers_that_do_not_refuse_it(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DecodeSettings().compiled_steps
    assert PrefillSettings().compiled_steps
    monkeypatch.setattr(engine_module, "compiled_kernel", lambda *_: pytest.fail("it was asked for"))
    assert not is_compiled(load(directory("three queries a head"), compiled=False))


@needs_kernel
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
def test_in_float32_weights_are_kept_in_half_the_bytes_where_nothing_is_lost(
    directory: Directory, weights: torch.dtype
) -> None:
    name = "three queries a head"
    before = load(directory(name, weights), compiled=False, dtype=torch.float32).execution.weight_bytes
    engine = load(directory(name, weights), dtype=torch.float32)
    assert is_compiled(engine)
    assert compiled_model(engine).weights is weights
    assert engine.execution.weight_bytes == pytest.approx(before * weights.itemsize / 4, rel=0.05)


def test_weights_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_steps, "ROWS_A_LOOK", 2)
    linear = torch.nn.Linear(3, 5, bias=False)
    linear.weight.data = torch.ones(5, 3)
    assert compiled_steps.fits_bfloat16([linear])
    linear.weight.data[4, 2] = 1 + 2**-10
    assert not compiled_steps.fits_bfloat16([linear])
