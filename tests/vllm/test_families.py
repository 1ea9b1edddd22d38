"""Tests of stacks that serve tiny random models of well-known families, against vLLM's own `LLM`.

Pages are checked by their contents on each hand-over. Prompts are computed in chunks, which end within pages.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.process.stack import SPLIT, Stack, running_stack
from tests.vllm.completions import TOKENS, Restart, answer, stream
from tests.vllm.families import FAMILIES, IN_BFLOAT16, LATENT_FAMILIES, save_family
from tests.vllm.oracle import vllm_greedy

pytestmark = pytest.mark.stack

LENGTHS = (5, 32, 150, 333)
CHUNK, WHOLE = 40, 512
"""Tokens of a prompt that are computed at once. In bfloat16 a prompt is computed whole, as `LLM` does."""
HERE = {"deepseek_v3", "gpt_oss", "gemma4", "falcon_h1"}
"""Latent attention with experts; windows and sinks; two KV groups; states. `--all-models` runs the others,
too."""
LEFT_OUT = 20
"""Tokens at the end of a prompt that another one has in common with it, but for them."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=() if each in HERE else pytest.mark.all_models) for each in FAMILIES],
)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def page_tokens(family: str) -> int:
    """The least number of tokens per page that vLLM's attention has on CPUs."""
    return 16 if family in LATENT_FAMILIES else 32


@pytest.fixture(scope="module")
def dtype(family: str) -> str:
    return "bfloat16" if family in IN_BFLOAT16 else "float32"


@pytest.fixture(scope="module")
def model(family: str, demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(family, tmp_path_factory.mktemp("families"), demo_model_dir)


@pytest.fixture(scope="module")
def family_prompts() -> list[list[int]]:
    """Prompts of several lengths, and at last one that begins as the longest."""
    numbers = random.Random(11)
    made = [[numbers.randrange(10, 40_000) for _ in range(length)] for length in LENGTHS]
    return [*made, made[-1][:-LEFT_OUT] + made[0]]


@pytest.fixture(scope="module")
def family_answers(
    model: Path,
    page_tokens: int,
    dtype: str,
    family_prompts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[list[int]]:
    """What vLLM's own `LLM` answers. It ends before the stack starts."""
    folder = tmp_path_factory.mktemp("oracle")
    return vllm_greedy(model, family_prompts, TOKENS, folder, page_tokens, dtype)


@pytest.fixture(scope="module")
def stack(model: Path, page_tokens: int, dtype: str, family_answers: list[list[int]]) -> Iterator[Stack]:
    assert family_answers
    with running_stack(
        str(model),
        by_commands=True,
        engine="vllm",
        dtype=dtype,
        page_tokens=str(page_tokens),
        kv_cache_memory="64MiB",
        kv_checksum="pages",
        prefix_cache="true" if dtype == "float32" else "false",
        prefill=[{"chunk_tokens": str(CHUNK if dtype == "float32" else WHOLE)}],
        decode=[SPLIT],
    ) as stack:
        yield stack


def test_a_family_s_answers_equal_vllm_alone(
    dtype: str, client: httpx.Client, family_prompts: list[list[int]], family_answers: list[list[int]]
) -> None:
    """One after the other, then all at once. The last prompt, and all of them then, find cached prefixes.

    In bfloat16 answers depend on the batch, so there each is computed alone.
    """
    assert [answer(client, each) for each in family_prompts] == family_answers
    with ThreadPoolExecutor(len(family_prompts) if dtype == "float32" else 1) as threads:
        assert list(threads.map(lambda each: answer(client, each), family_prompts)) == family_answers


def test_a_family_s_prefixes_are_reused(
    family: str,
    client: httpx.Client,
    stack: Stack,
    family_prompts: list[list[int]],
    family_answers: list[list[int]],
) -> None:
    """But for those in bfloat16, whose answers depend on how a prompt is divided."""
    for side in ("prefill-0", "decode-0"):
        reused = stack.services[side].total("baton_prefix_reused_tokens_total")
        assert (reused == 0) is (family in IN_BFLOAT16)
    assert answer(client, family_prompts[-1]) == family_answers[-1]


@pytest.mark.parametrize("family", ["deepseek_v3", "falcon_h1"], indirect=True, scope="module")
def test_decode_is_killed_in_mid_stream(
    family: str, client: httpx.Client, stack: Stack, family_prompts: list[list[int]]
) -> None:
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 60}
    undisturbed = [stream(client, each, **drawn) for each in family_prompts]
    kill = Restart(stack, "decode-0")
    with ThreadPoolExecutor(len(family_prompts)) as threads:
        disturbed = threads.map(lambda each: stream(client, each, kill, **drawn), family_prompts)
        assert list(disturbed) == undisturbed
    assert kill.was_made
    stack.wait_ready()
