"""Tests of what a worker's engine has done before the worker is ready."""

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.decode.settings import DecodeSettings
from baton.engine.engine_startup import start_draft_model, start_engine
from baton.engine.loading import engine_loading
from baton.engine.loading.draft_files import FoundModel
from baton.models.model_files import ModelKind, ModelSource
from baton.runtime.errors import StartupError
from baton.runtime.worker_settings import DraftModelFiles
from tests.engine.conftest import MakeEngine
from tests.models import recipes


def test_no_grammar_waits_for_the_vocabulary_nor_anybody_with_it(
    tiny_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is read at startup, since no other thread can run while it is read."""
    read: list[Path] = []
    monkeypatch.setattr(engine_loading, "read_vocabulary", lambda directory, _: read.append(directory))
    model = tiny_dir("llama-gqa-untied")
    settings = DecodeSettings(model=str(model), device="cpu", compiled_steps=False, kv_cache_memory=2**22)
    start_engine(settings, 1)
    assert read == [model]


def test_a_draft_model_with_states_is_refused(tiny_engine: MakeEngine, tmp_path: Path) -> None:
    directory = recipes.save(recipes.recipe("lfm2"), tmp_path / "lfm2")
    source = ModelSource(ModelKind.DIRECTORY, directory, "lfm2")
    files = DraftModelFiles(str(directory), 2**22)
    settings = DecodeSettings(model=str(directory), device="cpu", dtype="float32", compiled_steps=False)
    with pytest.raises(StartupError, match="lfm2: it needs states"):
        start_draft_model(tiny_engine("llama-gqa-untied"), FoundModel(source, directory), files, settings, 1)
