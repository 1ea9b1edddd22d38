"""Tests that weights are side by side in memory for which large pages were requested."""

import gc
from pathlib import Path

import pytest
import torch

from baton.engine.execution import weight_memory
from baton.engine.execution.weight_memory import AREA_BYTES, LINE_BYTES, WeightMemory
from tests.engine.execution.compiled_kernels import Directory, load, needs_kernel
from tests.engine.executions import compiled_model, is_compiled


def flags(address: int) -> list[str]:
    """Return the flags of the mapping around `address` (proc_pid_smaps(5))."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            start, end = (int(edge, 16) for edge in head.split("-"))
            within = start <= address < end
        elif within and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_copies_are_equal_and_side_by_side(dtype: torch.dtype) -> None:
    memory = WeightMemory()
    given = [
        torch.arange(count).to(dtype).view(shape) for count, shape in [(15, (3, 5)), (64, (8, 8)), (1, ())]
    ]
    transposed = given[1].T
    copies = [memory.put(each) for each in (*given, transposed)]
    for copy, tensor in zip(copies, (*given, transposed), strict=True):
        assert copy.is_contiguous()
        assert copy.equal(tensor)
    ends = [copy.data_ptr() + -(-copy.nbytes // LINE_BYTES) * LINE_BYTES for copy in copies]
    assert [copy.data_ptr() for copy in copies[1:]] == ends[:-1]
    assert copies[0].data_ptr() % LINE_BYTES == 0


def test_what_is_longer_than_an_area_has_one_of_its_own() -> None:
    memory = WeightMemory()
    small, large = (memory.put(torch.zeros(count, dtype=torch.uint8)) for count in (1, AREA_BYTES + 1))
    assert len(large) == AREA_BYTES + 1
    large[-1] = 1
    assert int(small[0]) == 0
    assert memory.put(torch.ones(AREA_BYTES, dtype=torch.uint8)).all()


def test_an_area_outlives_the_memory_with_what_lies_in_it() -> None:
    kept = WeightMemory().put(torch.ones(7))
    assert kept.equal(torch.ones(7))


def test_an_area_is_given_back_with_the_last_of_them() -> None:
    memory = WeightMemory()
    first, second = memory.put(torch.ones(7)), memory.put(torch.ones(7))
    place = first.data_ptr()
    del memory, first
    assert flags(place)
    del second
    with pytest.raises(AssertionError, match="nothing is mapped"):
        flags(place)


def test_where_the_system_refuses_an_area_weights_lie_in_the_librarys_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(length: int) -> None:
        raise MemoryError(f"{length} bytes")

    monkeypatch.setattr(weight_memory, "HostMemory", refused)
    assert WeightMemory().put(torch.ones(7)).equal(torch.ones(7))


def test_the_system_is_asked_for_large_pages() -> None:
    assert "hg" in flags(WeightMemory().put(torch.ones(7)).data_ptr())


@needs_kernel
def test_all_weights_of_a_compiled_step_are_there(directory: Directory) -> None:
    engine = load(directory("three queries a head"))
    assert is_compiled(engine)
    model = compiled_model(engine)
    weights = [
        weight.blocks
        for layer in model._layers
        for weight in (layer.qkv, layer.out, layer.gate_and_up, layer.down)
    ]
    assert [at for at in (*weights, model._model.head.blocks) if "hg" not in flags(at)] == []


@needs_kernel
def test_a_compiled_model_does_not_keep_its_files_mapped(directory: Directory) -> None:
    place = directory("three queries a head")
    engine = load(place, dtype=torch.float32)
    assert is_compiled(engine)
    gc.collect()
    assert str(place) not in Path("/proc/self/maps").read_text()
