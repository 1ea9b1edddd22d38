"""Test of `python -m bench perplexity`: a text by quantized weights beside plain ones."""

import math
from pathlib import Path

import pytest

from tests.bench.commands import bench
from tests.engine.execution.compiled_kernels import needs_kernel
from tests.engine.quantization.test_weight_quantization import SHAPE, gguf

pytestmark = pytest.mark.bench


@needs_kernel
def test_a_text_is_as_likely_by_a_files_own_blocks_as_by_what_they_stand_for(tmp_path: Path) -> None:
    file, _ = gguf(tmp_path)
    text = tmp_path / "text"
    text.write_text("".join(chr(1 + place * place % 31) for place in range(320)))  # which are a token each
    told = bench(
        *("perplexity", "--model", str(file), "--text", str(text), "--dtype", "float32"),
        *("--quantize", "keep", "--quantize", "int4"),
        environ={"XDG_CACHE_HOME": str(tmp_path)},
    )
    assert told["benchmark"] == "perplexity"
    assert told["tokens"] == 320
    seen = told["perplexity"]
    assert list(seen) == ["none", "keep", "int4"]
    assert math.isclose(seen["keep"], seen["none"], rel_tol=1e-4)
    assert 0.002 < abs(seen["int4"] / seen["none"] - 1) < 1
    assert seen["none"] > SHAPE["vocab_size"] / 4  # it has learned nothing
