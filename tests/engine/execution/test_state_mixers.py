"""Tests of state mixers whose rows are computed together, and of the check that decides it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.execution.state_mixers import StatePages, UnknownMixer, find_mixers
from baton.engine.loading.engine_loading import load_engine
from baton.engine.torch_engine import TorchEngine
from tests.engine.test_equals_reference import random_prompts
from tests.inference.engine_worker import ShuffledWorker
from tests.models import recipes
from tests.oracle import reference_greedy

OUTPUT_TOKENS = 6
BATCHED = ("qwen3_5_text", "mamba2", "falcon_h1", "nemotron_h", "lfm2", "kimi_linear")
ROW_BY_ROW = ("zamba2",)


def loaded(kind: str, directory: Path, dtype: str = "float32") -> TorchEngine:
    saved = recipes.save(recipes.recipe(kind), directory / kind)
    return load_engine(saved, dtype=dtype, device="cpu", kv_cache_memory=2**24)


@pytest.mark.parametrize("kind", [*BATCHED, *ROW_BY_ROW])
def test_rows_of_many_sequences_are_those_of_generate(tmp_path: Path, kind: str) -> None:
    """Prompts of one token, and rows of one and of several tokens in a step."""
    engine = loaded(kind, tmp_path)
    together = engine.execution.kind is ExecutionKind.LIBRARY
    assert together == (kind in BATCHED)
    prompts = random_prompts((1, 5, 40, 1, 17))
    expected = reference_greedy(tmp_path / kind, prompts, OUTPUT_TOKENS)
    worker = ShuffledWorker(engine)
    tenants = []
    for prompt in prompts:
        tenants.append(worker.admit(prompt, OUTPUT_TOKENS))
        worker.step([each for each in tenants if not each.done], 512)
    while not all(each.done for each in tenants):
        worker.step([each for each in tenants if not each.done], 512)
    assert [each.sequence.output for each in tenants] == expected


def test_a_model_in_bfloat16_is_computed_together(tmp_path: Path) -> None:
    assert loaded("qwen3_5_text", tmp_path, "bfloat16").execution.kind is ExecutionKind.LIBRARY


Continued = Callable[..., torch.Tensor]


def forgetting(own: Continued) -> Continued:
    """Return a `StatePages.continued` that begins each row without states."""
    return lambda *given, **named: own(*given, **(named | {"loaded": False}))


def mixing(own: Continued) -> Continued:
    """Return a `StatePages.continued` that stores states in the page of another row."""

    def continued(
        pages: Any,
        layer: int,
        hidden: torch.Tensor,
        own_pages: Sequence[torch.Tensor],
        *rest: Any,
        **named: Any,
    ) -> torch.Tensor:
        return own(pages, layer, hidden, [each.flip(0) for each in own_pages], *rest, **named)

    return continued


@pytest.mark.parametrize("wrong", [forgetting, mixing])
def test_probe_can_fail_rows_that_differ_are_computed_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Continued], Continued]
) -> None:
    monkeypatch.setattr(StatePages, "continued", wrong(StatePages.continued))
    engine = loaded("qwen3_5_text", tmp_path)
    assert engine.execution.kind is ExecutionKind.ROW_BY_ROW
    (prompt,) = random_prompts((20,))
    worker = ShuffledWorker(engine)
    tenant = worker.admit(prompt, OUTPUT_TOKENS)
    while not tenant.done:
        worker.step([tenant], 7)
    assert [tenant.sequence.output] == reference_greedy(tmp_path / "qwen3_5_text", [prompt], OUTPUT_TOKENS)


class Mixer(torch.nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.update_conv_state(hidden, self.layer)
        return hidden


def test_a_mixer_is_the_module_that_gets_the_cache_and_updates_a_state() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), Mixer(1), Mixer(0))

    def compute(cache: Cache) -> None:
        hidden = module[0](torch.zeros(1, 3, 2))
        module[2](module[1](hidden, cache), cache=cache)

    found = find_mixers(module, [LinearAttentionLayer(), LinearAttentionLayer()], compute)
    assert [(each.layer, each.module, each.cache_argument) for each in found] == [
        (0, module[2], "cache"),
        (1, module[1], "cache"),
    ]


@pytest.mark.parametrize("layers", [(0, 0), (0, 1)])
def test_states_that_are_not_one_modules_are_refused(layers: tuple[int, int]) -> None:
    """Of one layer by two modules, and of two layers by one."""
    module = torch.nn.ModuleList([Mixer(0), Mixer(0)])
    used = (0, 1) if layers == (0, 0) else (0, 0)

    def compute(cache: Cache) -> None:
        for index, layer in zip(used, layers, strict=True):
            mixer = module[index]
            assert isinstance(mixer, Mixer)
            mixer.layer = layer
            mixer(torch.zeros(1, 3, 2), cache)

    with pytest.raises(UnknownMixer):
        find_mixers(module, [LinearAttentionLayer(), LinearAttentionLayer()], compute)
