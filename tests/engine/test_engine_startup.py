"""Tests of what a worker's engine has done before the worker is ready."""

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.decode.settings import DecodeSettings
from baton.engine.engine_startup import start_engine
from baton.engine.loading import engine_loading


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
