"""Tests that models are refused by their files before a command starts anything."""

import json
from pathlib import Path

import pytest

from baton.decode.settings import DecodeSettings
from baton.launch import engine_table
from baton.launch.model_check import check_models, check_worker_models
from baton.models.model_facts import UnsupportedModel
from baton.runtime.errors import StartupError


def test_each_draft_model_is_checked(demo_model_dir: Path, tmp_path: Path) -> None:
    demo, missing = str(demo_model_dir), str(tmp_path / "missing")
    check_models(demo, "auto", [demo])
    for drafts in ([missing, demo], [demo, missing]):
        with pytest.raises(StartupError, match=f"^--speculate model:{missing}: "):
            check_models(demo, "auto", drafts)


def test_a_worker_is_refused_what_its_own_engine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bootstrap is not refused it, since its workers may have another engine."""
    words = {
        "model_type": "gemma3n_text",
        "num_kv_shared_layers": 2,
        "vocab_size": 8,
        "max_position_embeddings": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(words))
    check_models(str(tmp_path), "dummy")
    monkeypatch.setattr(engine_table.choose_engine, "__defaults__", ({}, lambda _: True, lambda _: ()))
    check_worker_models(DecodeSettings(model=str(tmp_path), load_format="dummy", engine="vllm"))
    with pytest.raises(UnsupportedModel, match="it needs keys and values shared between layers"):
        check_worker_models(DecodeSettings(model=str(tmp_path), load_format="dummy", engine="torch"))
