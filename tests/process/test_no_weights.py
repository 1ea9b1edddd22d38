"""Tests of a router whose model directory has no weights."""

import signal
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from tests.http import web
from tests.oracle import reference_greedy
from tests.process.load import any_prompts
from tests.process.stack import READY_S, Stack
from tests.process.structured import tiny_model

OUTPUT_TOKENS = 12
REFUSED = "model differs: this stack has"


@pytest.fixture(scope="module")
def model(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", demo_model_dir)


@pytest.fixture
def stack(model: Path, tmp_path: Path) -> Iterator[Stack]:
    small = tmp_path / "small"
    copytree(model, small, ignore=ignore_patterns("*.safetensors"))
    stack = Stack(str(small), tmp_path, {"dtype": "float32", "kv_cache_memory": "8MiB"})
    try:
        stack.start_bootstrap(lease_ms="10000")
        stack.model = str(model)
        stack.start_worker("prefill", "prefill-0")
        stack.start_worker("decode", "decode-0")
        stack.wait_ready()
        yield stack
    finally:
        for service in stack.services.values():
            if service.process.poll() is None:
                service.process.send_signal(signal.SIGCONT)
                service.kill()


def with_other_weights(model: Path, directory: Path) -> str:
    """Return a copy of a model in which one bit of the weights differs."""
    copytree(model, directory)
    weights = directory / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    return str(directory)


@pytest.mark.timeout(300)
def test_answers_are_equal_and_other_weights_are_refused(stack: Stack, model: Path, tmp_path: Path) -> None:
    prompts = [list(prompt) for prompt in any_prompts((20, 61), 1_000)]
    body = {"prompt": prompts, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "return_token_ids": True}
    reply = web().post(f"{stack.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    answers = [each["token_ids"] for each in reply.json()["choices"]]
    assert answers == reference_greedy(model, prompts, OUTPUT_TOKENS)
    stack.model = with_other_weights(model, tmp_path / "other")
    late = stack.start_worker("decode", "decode-1")
    stack.wait_until(lambda: REFUSED in late.tail(), READY_S, "the other weights are refused")
    assert {each["name"] for each in stack.workers()} == {"prefill-0", "decode-0"}
