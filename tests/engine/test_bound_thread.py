"""Tests that the thread that transfers knows the device whose memory it transfers.

Contexts belong to threads: the one that loads the model and the one that computes have theirs from torch, the
event loop's has none unless it is given one.
"""

import asyncio
import ctypes
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from baton.decode.settings import DecodeSettings
from baton.ids import Incarnation
from baton.inference.device import bind_thread
from baton.prefill.metrics import PrefillMetrics
from baton.prefill.settings import PrefillSettings
from baton.worker import wiring
from baton.worker.step_thread import StepThread
from bench.workers.rooms_worker import ToyEngine
from tests.engine.conftest import MakeEngine


class Reached(Exception):
    """Raised where the transfer would be made."""


@pytest.mark.parametrize("settings", [PrefillSettings(), DecodeSettings()], ids=["prefill", "decode"])
async def test_a_worker_binds_it_before_it_makes_its_transfer(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[int] = []

    class Bound(ToyEngine):
        def bind_thread(self) -> None:
            bound.append(threading.get_ident())

    def make(_: Incarnation) -> None:
        assert bound == [threading.get_ident()]
        raise Reached

    async def start_pages(*_: object) -> None: ...

    monkeypatch.setattr(wiring, "NixlTransfer", make)
    host: Any = SimpleNamespace(start_pages=start_pages, mailbox=None)
    start: Any = wiring.Start(settings, Bound, host, Incarnation(5), b"")
    with pytest.raises(Reached):
        await start.serve(PrefillMetrics, pytest.fail, asyncio.Event())


def test_an_engine_binds_a_thread_to_the_device_of_its_pages(
    tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = tiny_engine("llama-gqa-untied"), list[tuple[str, torch.device]]()
    monkeypatch.setattr(engine, "device", torch.device("cuda:3"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append(("choose", device)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append(("call", device)))
    engine.bind_thread()
    place = torch.device("cuda", 3)
    assert asked == [("choose", place), ("call", place)], "a context comes with the first call that needs one"


async def test_a_thread_that_makes_steps_knows_the_number_of_threads_that_was_set(
    tiny_engine: MakeEngine,
) -> None:
    """Otherwise it uses the number that the process began with, until something reads the number."""
    counted: list[str] = []
    with patch.object(torch, "get_num_threads", lambda: counted.append(threading.current_thread().name)):
        step_thread = StepThread(tiny_engine("llama-gqa-untied"), lambda: None)
        step_thread.start_sum([])
        assert step_thread.running is not None
        await step_thread.running
        step_thread.close()
    assert counted == ["engine_0"]


def test_a_cpu_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: pytest.fail("there may be no CUDA here"))
    bind_thread("cpu")


@pytest.mark.gpu
def test_a_thread_that_was_bound_has_a_context() -> None:
    torch.zeros(1, device="cuda:0")  # this thread's, and not the other's
    libcuda = ctypes.CDLL("libcuda.so.1")
    found: list[bool] = []

    def look() -> None:
        for bind in (False, True):
            if bind:
                bind_thread("cuda:0")
            context = ctypes.c_void_p()
            assert libcuda.cuCtxGetCurrent(ctypes.byref(context)) == 0
            found.append(context.value is not None)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [False, True]
