"""Tests that faults in the C source of the compiled step are detected.

The mutants of `tests/mutants` are faults in modules of Python, which a process imports; these are compiled
instead. `make verify-kernels` runs them, since each is compiled anew: each once, by the build with the widest
bound that has the place in it. The tiles of AMX, and pairs of products, are emulated.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import pytest
import torch

from baton.engine.execution import step_compiler
from baton.engine.execution.agreement import relative_difference
from baton.engine.execution.step_compiler import AVX512, load_or_compile
from baton.engine.torch_engine import TorchEngine
from baton.engine_interface import Row
from tests.engine.execution.compiled_kernels import (
    BOUND,
    BUILDS,
    EMULATED,
    KERNELS,
    MODELS,
    Directory,
    entries,
    filled,
    load_for,
    logits_of,
    needs_kernel,
    stored_for,
)
from tests.engine.executions import compiled_model
from tests.pairwise import cover, every

pytestmark = pytest.mark.emulated

FAULTS: Final[dict[str, tuple[str, str]]] = {
    "rotated the other way": ("- other * load(sine + at)", "+ other * load(sine + at)"),
    "its own token is not seen": (
        "count = s->positions[token] + 1 - base",
        "count = s->positions[token] + !row - base",
    ),
    "tokens after it are seen": ("s->positions[first + token] + 1 - base, end)", "count, end)"),
    "tokens before it are not seen": ("s->positions[first + token] + 1 - base, end)", "token + 1, end)"),
    "a token sees what lies before its window": ("hidden - base);", "0);"),
    "a prompt sees what lies before its windows": ("s->positions[first + token]) - base);", "0) - base);"),
    "the first pages for a window's": ("+ base / s->page_tokens;", ";"),
    "the first values for a window's": ("head_dim + base * BLOCK;", "head_dim;"),
    "not scaled": ("scaling - top", "1 - top"),
    "the first query for all": ("seen + query * head_dim, head_dim, head_dim,", "seen, 0, head_dim,"),
    "the first values for all": ("w->values.stride + begin + from;", "w->values.stride + begin;"),
    "a single token is not scaled": (
        "soften(scores + (query + each) * s->longest, scaling,",
        "soften(scores + (query + each) * s->longest, 1,",
    ),
    "a prompt is not scaled": (
        "soften(scores + token * s->longest, scaling,",
        "soften(scores + token * s->longest, 1,",
    ),
    "one layer's pages for all": (" + index * s->layer_stride;", ";"),
    "what was is not added to": (
        "s->gated, m->width, hidden, rows, s->x, 1, s->sums)",
        "s->gated, m->width, hidden, rows, s->x, 0, s->sums)",
    ),
    "gates and what they let through": ("exponential(-one)", "exponential(-other)"),
    "one norm for both": ("layer->before_gate, layer->before_gate_epsilon", "layer->before_attention, 1"),
    "one page for all": ("p->of + *page * p->stride", "p->of + *p->table * p->stride"),
    "keys for values": ("    pages.of += s->plane_stride;\n", ""),
    "a single token's keys for its values": ("        w.values.of += s->plane_stride;\n", ""),
    "the first half of the keys for all": (
        "fours[each + LANES / 2], 0x31)",
        "fours[each + LANES / 2], 0x20)",
    ),
    "words that did not change places": ("    exchange(of, 1);\n", ""),
    "not divided": ("1.0f / w->sum[query]", "1.0f"),
    "the first rows' logits": ("s->x + s->keep[place] * hidden", "s->x + place * hidden"),
    "what the first rows saw": ("s->seen + s->keep[place] * of_heads", "s->seen + place * of_heads"),
    "its last token does not look": (
        "s->keep[place] < first + tokens",
        "s->keep[place] < first + tokens - 1",
    ),
    "one token for both of a pair": ("value[token + 1] + begin + at", "value[token] + begin + at"),
    "halves the other way round": ("low & ~0xffff : low << 16", "low << 16 : low & ~0xffff"),
    "half of a block": (
        "store(to + row * to_stride + LANES, sum[row][1])",
        "store(to + row * to_stride, sum[row][1])",
    ),
    "kept as something else": ("(uints)told >> 16", "(uints)told >> 15"),
    "read as whole numbers": (
        "_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16)",
        "_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 15)",
    ),
    "the upper rows for the lower ones": ("(a) + SIDE_OF_TILE * (stride)", "(a)"),
    "the lower rows' second half": ("_tile_dpbf16ps(3, 5, 7)", "_tile_dpbf16ps(3, 5, 6)"),
    "the end of the depth is left out": ("if (rest) {", "if (0) {"),
    "the end of the rows' depth is their beginning": ("a + row * stride + whole", "a + row * stride"),
    "only the last values are weighed": ("queries, first > 0, sums)", "queries, 0, sums)"),
    "all values at one place": ("find(&w->values, first, value)", "find(&w->values, 0, value)"),
    "the lower sums over the upper ones": (
        "_tile_stored(2, to + SIDE_OF_TILE * to_stride,",
        "_tile_stored(2, to,",
    ),
    "tiles of other rows": ("if (set_for == rows) return;", "if (set_for) return;"),
    "a part's rows are the first ones": (
        "multiply_block(block, from_row(fed, row),",
        "multiply_block(block, fed,",
    ),
    "the codes of one half for both": (
        "two = of_nibbles(words, 8 * each + 4)",
        "two = of_nibbles(words, 8 * each)",
    ),
    "codes of 8 bits without a sign": ("_mm256_cvtepi8_epi32", "_mm256_cvtepu8_epi32"),
    "one half's scales for both": (
        "load_scales(scales + half * of_scales / 2, bytes);",
        "load_scales(scales, bytes);",
    ),
    "leasts for scales": (
        "here += of_scales << has_leasts;",
        "here += of_scales << has_leasts, scales += of_scales * has_leasts;",
    ),
    "nothing is least": ("sum[row][half] += least * sums[row * groups];", "(void)least;"),
    "the first group's least for all": ("        sums++;\n", ""),
    "codes in the weight's last group are left out": (
        "first + weight->group < depth ? first + weight->group : depth",
        "first + weight->group <= depth ? first + weight->group : first",
    ),
    "sums of another row": ("to[row * groups + group] = total(sum);", "to[group] = total(sum);"),
}
"""Changes of the source by name: a text in it, and its replacement."""
OF_TILES: Final = {
    *("the upper rows for the lower ones", "the lower rows' second half"),
    *("the end of the depth is left out", "the end of the rows' depth is their beginning"),
    *("the lower sums over the upper ones", "tiles of other rows", "a part's rows are the first ones"),
    *("only the last values are weighed", "all values at one place"),
}
OF_CODES: Final = {
    *("the codes of one half for both", "codes of 8 bits without a sign", "one half's scales for both"),
    *("leasts for scales", "nothing is least", "the first group's least for all", "sums of another row"),
    "codes in the weight's last group are left out",
}
OF_PAIRS: Final = {"one token for both of a pair", "words that did not change places"}
TILES: Final = "in bfloat16 by AMX, emulated"
PAIRS: Final = "in bfloat16, emulated"
ALL: Final = "in bfloat16 by AVX2"
CODED: Final = "of codes in bfloat16 by AVX2"
NONE: Final = "none"
"""Name of the unchanged source."""
NEAR: Final = " NEAR = 1 << 20,"
NEARER: Final = " NEAR = 1 << 12,"
"""Replacement that makes rows be multiplied in parts, as AMX does with long prompts."""
IN_PARTS: Final = {NONE, "a part's rows are the first ones"}


def build_for(fault: str) -> str:
    special = ((TILES, OF_TILES), (PAIRS, OF_PAIRS), (CODED, OF_CODES))
    return next((name for name, faults in special if fault in faults), ALL)


@dataclass(frozen=True, slots=True)
class Sound:
    """An engine, a step of it, and its correct results."""

    engine: TorchEngine
    rows: list[Row]
    before: torch.Tensor
    logits: torch.Tensor
    entries: torch.Tensor


@pytest.fixture(scope="module")
def sound(directory: Directory) -> Callable[[str], Sound]:
    """Return a sound engine with one of the builds."""

    @cache
    def find(name: str) -> Sound:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_compiler, "BUILDS", (KERNELS[name],))
            step_compiler.kernel.cache_clear()
            engine = load_for(KERNELS[name], directory, "three queries a head")
            step_compiler.kernel.cache_clear()
        rows = filled(engine)
        before = engine.cache.tensor.clone()
        return Sound(engine, rows, before, logits_of(engine, rows), entries(engine, rows))

    return find


@needs_kernel
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, NONE) for name in (ALL, PAIRS, TILES, CODED)),
        *((build_for(fault), fault) for fault in FAULTS),
    ],
)
def test_a_fault_in_the_source_is_seen(
    sound: Callable[[str], Sound], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: str
) -> None:
    """A fault exceeds the tolerance of the step's tests, and the unchanged source does not."""
    right = sound(name)
    source, (before, after) = step_compiler.SOURCE.read_text(), FAULTS.get(fault, ("", ""))
    assert before in source
    assert NEAR in source
    faulty = tmp_path / step_compiler.SOURCE.name
    faulty.write_text(source.replace(before, after).replace(NEAR, NEARER if fault in IN_PARTS else NEAR))
    monkeypatch.setattr(step_compiler, "SOURCE", faulty)
    monkeypatch.setattr(
        step_compiler, "FLAGS", (*step_compiler.FLAGS, "-O0")
    )  # a quarter of the time to compile
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled_model(right.engine), "kernel", load_or_compile(KERNELS[name]))
    right.engine.cache.tensor.copy_(right.before)
    gaps = (
        relative_difference(logits_of(right.engine, right.rows), right.logits),
        relative_difference(entries(right.engine, right.rows), right.entries),
    )
    assert (max(gaps) <= BOUND) is (fault == NONE)


WATCHED: Final = (*EMULATED, *(name for name, build in BUILDS.items() if not set(AVX512) <= set(build.needs)))
"""Builds whose reads and writes are all checked: a CPU's own tiles and masked operations are not."""
CASES: Final = cover(every({"name": list(MODELS), "page_tokens": (4, 16, 64), "build": WATCHED}))


@needs_kernel
@pytest.mark.timeout(600)
@pytest.mark.parametrize("planted", [False, True])
def test_a_step_stays_within_its_tensors(directory: Directory, tmp_path: Path, planted: bool) -> None:
    """AddressSanitizer reports no access, and does report a planted fault."""
    asked = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, timeout=60, check=True
    )
    library = asked.stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("gcc has no AddressSanitizer here")
    told = [
        (
            case["build"],
            str(directory(case["name"], stored_for(KERNELS[case["build"]]))),
            case["page_tokens"],
        )
        for case in CASES
    ]
    source, end = step_compiler.SOURCE.read_text(), "count, up_to(count, STRIP))"
    assert end in source
    copy = tmp_path / step_compiler.SOURCE.name
    copy.write_text(source.replace(end, "count, up_to(count, STRIP) + 512)") if planted else source)
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.engine.execution.sanitized",
            str(copy),
            json.dumps(told[-1:] if planted else told),
        ],
        cwd=Path(__file__).parents[3],
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
