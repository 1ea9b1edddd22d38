"""Tests that a GPU is flushed of a network card's writes before pages are read, where it has to be.

With a driver that only writes down what it is asked; CUDA's own is in `test_cuda.py`.
"""

import ctypes
import logging
from typing import Any

import pytest
import torch

from baton.engine.torch_engine import TorchEngine
from baton.inference import remote_writes
from baton.inference.collectives import alone
from baton.inference.remote_writes import FLUSH_OPTIONS, ORDERING, SUPPORTED, flush_for
from tests.engine.conftest import MakeEngine
from tests.engine.test_equals_reference import random_prompts
from tests.inference.engine_worker import ShuffledWorker

GPU = torch.device("cuda", 1)


class Driver:
    """CUDA's driver for a device with these properties."""

    def __init__(self, ordering: int, options: int, code: int = 0, supported: int = 1) -> None:
        self._told = {SUPPORTED: supported, ORDERING: ordering, FLUSH_OPTIONS: options}
        self._code = code
        self.flushed: list[tuple[int, int]] = []

    def cuDeviceGet(self, number: Any, index: int) -> int:  # noqa: N802
        number._obj.value = 40 + index
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, number: ctypes.c_int) -> int:  # noqa: N802
        assert number.value == 41
        value._obj.value = self._told[attribute]
        return 0

    def cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:  # noqa: N802
        self.flushed.append((target, scope))
        return self._code


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_writes, "bind_thread", lambda device: None)


def test_a_device_that_does_not_order_writes_is_flushed() -> None:
    driver = Driver(ordering=0, options=3)
    flush = flush_for(GPU, driver)
    assert flush is not None
    assert driver.flushed == []
    flush()
    assert driver.flushed == [(0, 100)]


@pytest.mark.parametrize("ordering", [100, 200])
def test_one_that_does_is_left_alone(ordering: int, caplog: pytest.LogCaptureFixture) -> None:
    assert flush_for(GPU, Driver(ordering, options=1)) is None
    assert not caplog.records


def test_one_that_no_network_card_writes_to_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert flush_for(GPU, Driver(ordering=0, options=0, supported=0)) is None
    assert not caplog.records


def test_of_one_that_cannot_be_flushed_the_log_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert flush_for(GPU, Driver(ordering=0, options=2)) is None
    (said,) = caplog.records
    assert "--kv-checksum pages" in str(vars(said))


def test_a_flush_that_fails_fails_what_was_to_look() -> None:
    flush = flush_for(GPU, Driver(ordering=0, options=1, code=201))
    assert flush is not None
    with pytest.raises(RuntimeError, match="error 201"):
        flush()


def test_on_a_cpu_there_is_nothing_to_flush() -> None:
    assert flush_for(torch.device("cpu")) is None


def test_an_engine_flushes_before_it_looks_at_pages_in_steps_and_in_sums(tiny_engine: MakeEngine) -> None:
    plain = tiny_engine("llama-gqa-untied")
    seen: list[bool] = []
    engine = TorchEngine(
        *(plain.model, plain.whole, [plain.cache], alone(), plain.execution, plain.runner),
        flush=lambda: seen.append(True),
    )
    worker = ShuffledWorker(engine)
    (prompt,) = random_prompts((5,))
    worker.run([worker.admit(prompt, 3)], chunk=5)
    assert len(seen) == 3
    engine.sum_pages([])
    assert len(seen) == 4
