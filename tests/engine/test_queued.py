"""Tests that a step on a GPU ends when its queued work has ended, not when its calls return.

No GPU is needed: what is asked of the device is noted instead.
"""

from collections import abc

import pytest
import torch

from baton.engine.torch_engine import TorchEngine
from baton.engine_interface import EngineLost, Row, Sequence
from baton.rooms.request import Request
from tests.engine import tiny_models
from tests.engine.conftest import MakeEngine

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices that were waited for, in order."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", devices.append)
    return devices


@pytest.fixture
def engine(tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    """An engine that seems to compute on DEVICE."""
    made = tiny_engine("llama-gqa-untied")
    monkeypatch.setattr(made, "device", DEVICE)
    return made


def rows() -> list[Row]:
    sequence = Sequence(Request("1", (1, 2, 3), max_tokens=1), [])
    return [Row(sequence, 0, 3, ((0,),), sample=True)]


def test_written_before_sent_a_step_ends_when_the_device_has_done_what_was_queued(
    engine: TorchEngine, waits: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.runner, "logits", lambda _: torch.zeros(1, tiny_models.VOCABULARY))
    engine.step(rows())
    assert waits == [DEVICE]


def test_no_free_under_write_a_step_that_fails_ends_no_earlier(
    engine: TorchEngine, waits: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rooms of a failed step give their pages back, and other peers may write there. So its queued
    kernels have to end first."""

    def queue_some(_: abc.Sequence[Row]) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for the second layer")

    monkeypatch.setattr(engine.runner, "logits", queue_some)
    with pytest.raises(torch.OutOfMemoryError):
        engine.step(rows())
    assert waits == [DEVICE]
    assert engine.step([]) == []


def test_a_device_that_is_lost_is_told_of_whatever_the_step_failed_by(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker ends by that, and not after more steps."""

    def lost(_: torch.device) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    def fail(_: abc.Sequence[Row]) -> torch.Tensor:
        raise ValueError("this row's, while the device still worked")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(engine.runner, "logits", fail)
    with pytest.raises(EngineLost):
        engine.step(rows())
