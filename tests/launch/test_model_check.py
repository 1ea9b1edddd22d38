"""Tests that models are refused by their files before a command starts anything."""

from pathlib import Path

import pytest

from baton.launch.model_check import check_models
from baton.runtime.errors import StartupError


def test_each_draft_model_is_checked(demo_model_dir: Path, tmp_path: Path) -> None:
    demo, missing = str(demo_model_dir), str(tmp_path / "missing")
    check_models(demo, "auto", [demo])
    for drafts in ([missing, demo], [demo, missing]):
        with pytest.raises(StartupError, match=f"^--speculate model:{missing}: "):
            check_models(demo, "auto", drafts)
