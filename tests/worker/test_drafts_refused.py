"""Tests that a decode worker refuses drafts at its start where its engine checks none."""

from types import SimpleNamespace
from typing import Any

import pytest

from baton.decode.settings import DecodeSettings
from baton.decode.wiring import fit
from baton.engine_interface import EngineFacts
from baton.runtime.errors import StartupError


@pytest.mark.parametrize("speculate", ["ngram", "model:/drafts"])
def test_drafts_are_refused_by_name_at_the_start(speculate: str) -> None:
    facts = EngineFacts("vllm", batch_invariant=True, chunked_prompts=False)
    settings, engine = DecodeSettings(speculate=speculate), SimpleNamespace(facts=facts)
    rank: Any = SimpleNamespace(settings=settings, host=None, engine=engine)
    metrics: Any = None
    with pytest.raises(StartupError, match=rf"^--speculate {speculate}: --engine vllm checks no drafts"):
        fit(rank, metrics)
