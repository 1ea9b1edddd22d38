"""Tests that docs/models.md names every type of the installed model library and is right about it."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import FalconConfig

from baton.engine.execution.attention_span import AttentionSpan
from baton.engine.torch_engine import TorchEngine
from tests.engine import tiny_models
from tests.models import recipes
from tests.models.comparison import Outcome, TrialVerdict, prompts
from tests.models.page import NOT_SERVED, PAGE, REWRITE, cell, family_section, rendered, rows_of, vllm_section
from tests.models.recipes import VOCABULARY
from tests.models.sweep import all_types
from tests.models.trial import differences, generated, loaded, try_model
from tests.models.vllm_outcomes import VllmOutcomes

SWEEP_S = 900
EVERY = 20
ONE_OF_EACH = {
    "llama": "our own pass",
    "gemma2": "the library's definition",
    "gpt_oss": "the library's definition",
    "qwen3_vl": "our own pass",
    "falcon": "the library's definition, row by row",
    "bloom": "the library's definition, row by row",
    "bart": "the library's definition, row by row",
    "qwen3_next": "the library's definition",
    "kimi_linear": "the library's definition",
    "lfm2": "the library's definition",
    "falcon_h1": "the library's definition",
    "nemotron_h": "the library's definition",
    "mamba2": "the library's definition",
}


def test_the_page_is_of_the_installed_library_and_names_all_its_types() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"transformers\n{transformers.__version__}. " in text, (
        f"another version is installed: run {REWRITE}"
    )
    missing = [kind for kind in all_types() if f"`{kind}`" not in text]
    assert not missing, f"run {REWRITE}"


def test_the_page_has_the_recorded_outcomes_on_vllms_engine() -> None:
    text, recorded = PAGE.read_text(encoding="utf-8"), VllmOutcomes.read()
    assert text.endswith("\n".join(vllm_section(recorded)) + "\n"), f"run {REWRITE}"
    cells = {kind: row.split(" | ")[-1].removesuffix(" |") for kind, row in rows(text).items()}
    assert cells == {kind: cell(recorded, kind) for kind in cells}
    assert len({kind for kind, each in cells.items() if each == TrialVerdict.EQUAL.value}) > 60


def test_the_table_of_families_is_of_the_page_s_other_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert "\n".join(family_section(outcomes_of(text), VllmOutcomes.read())) + "\n" in text


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_answers_are_those_of_generate(tmp_path: Path, kind: str) -> None:
    """Alone and together, in long and short chunks, after a hand-over, and behind another's prefix."""
    outcome = try_model(recipes.save(recipes.recipe(kind), tmp_path / kind))
    assert (outcome.verdict, outcome.words) == (TrialVerdict.EQUAL, ONE_OF_EACH[kind])


@pytest.mark.sweep
@pytest.mark.timeout(SWEEP_S + 60)
def test_what_the_page_says_of_some_types_is_what_comes_of_them() -> None:
    """A sample of all types is tried here. `make verify-models` tries them all."""
    text = PAGE.read_text(encoding="utf-8")
    told = rows(text)
    some = sorted(told)[::EVERY]
    outcomes = swept(some)
    assert {kind: each.words for kind, each in outcomes.items() if each.verdict != TrialVerdict.EQUAL} == {}
    assert {kind: told[kind] for kind in some} == rows("\n".join(rows_of(outcomes, some)))


def rows(text: str) -> dict[str, str]:
    """Lines of the page's tables of what is served, by type."""
    served = re.finditer(r"^\| `([^`]+)` \| .*\| (?:yes|no) \| [^|]* \|$", text, re.MULTILINE)
    return {found[1]: found[0] for found in served}


def outcomes_of(text: str) -> dict[str, Outcome]:
    """Outcomes of the types that the page says are served or refused."""
    outcomes = {}
    for kind, row in rows(text).items():
        _, words, sights, *_ = row.removeprefix("| ").split(" | ")
        features = tuple(each for each in sights.split(", ") if each)
        outcomes[kind] = Outcome(TrialVerdict.EQUAL, words, features)
    for line in text.partition(NOT_SERVED)[2].partition("\n\n")[0].splitlines():
        _, words, kinds, _ = line.split("|")
        for kind in re.findall("`(.*?)`", kinds):
            outcomes[kind] = Outcome(TrialVerdict.REFUSED, words.strip())
    return outcomes


def swept(kinds: Sequence[str] = ()) -> dict[str, Outcome]:
    """Return the outcomes of trials of these types, or of all types, by type."""
    command = [sys.executable, "-m", "tests.models", "--json", *kinds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SWEEP_S, check=True)
    return {kind: Outcome.of(told) for kind, told in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.sweep
@pytest.mark.all_models
@pytest.mark.timeout(SWEEP_S + 60)
def test_what_the_page_says_of_each_type_is_what_comes_of_it() -> None:
    outcomes = swept()
    bad = {
        kind: each.words
        for kind, each in outcomes.items()
        if each.verdict in (TrialVerdict.WRONG, TrialVerdict.BROKEN)
    }
    assert not bad
    assert rendered(outcomes) == PAGE.read_text(encoding="utf-8"), f"run {REWRITE}"


def test_the_trial_says_where_the_library_s_attentions_differ(tmp_path: Path) -> None:
    """Falcon's ALiBi is another number in each. Rows are computed by the library's default, which is SDPA."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = FalconConfig(**shape, alibi=True, initializer_range=0.5, bos_token_id=None, eos_token_id=None)
    outcome = try_model(tiny_models.save(config, tmp_path / "falcon"))
    assert (outcome.verdict, outcome.sights) == (TrialVerdict.EQUAL, ("SDPA, where eager differs",))


def off_by_one(engine: TorchEngine) -> None:
    for layer, reach in engine.model.spans.items():
        engine.model.spans[layer] = AttentionSpan(reach.tokens - 1, reach.in_chunks)


def test_the_trial_can_fail_a_window_that_is_off_by_a_token(tmp_path: Path) -> None:
    directory = recipes.save(recipes.recipe("mistral"), tmp_path / "mistral")
    engine, expected = loaded(directory), generated(directory)
    assert not list(differences(engine, prompts(), expected))
    off_by_one(engine)
    assert any(
        "log probabilities" in each or "tokens" in each for each in differences(engine, prompts(), expected)
    )
