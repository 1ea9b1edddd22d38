"""Tests that a worker whose memory cannot be registered for transfers reports it in one line."""

import os

import pytest

from baton.ids import Incarnation
from baton.runtime.errors import StartupError
from baton.runtime.host_memory import HostMemory
from baton.transfer.nixl import NixlTransfer
from baton.transfer.refused_memory import explain_refused_memory
from baton.transfer.transfer_protocol import Region, TransferError


def test_settings_of_the_library_in_the_environment_are_named_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library itself says NIXL_ERR_BACKEND alone."""
    for name in [name for name in os.environ if name.startswith(("UCX_", "NIXL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UCX_TLS", "nonsense")
    monkeypatch.setenv("UCX_NET_DEVICES", "eth99")
    with pytest.raises(StartupError) as refused, explain_refused_memory("cpu"):
        raise TransferError("NIXL_ERR_BACKEND")
    assert str(refused.value) == (
        "the KV pages on cpu cannot be transferred: NIXL_ERR_BACKEND; the environment sets "
        "UCX_NET_DEVICES=eth99 UCX_TLS=nonsense"
    )


def test_memory_that_is_on_no_device_here_is_refused_by_name() -> None:
    memory = HostMemory(4096)
    transfer = NixlTransfer(Incarnation(5))
    try:
        with pytest.raises(StartupError) as refused, explain_refused_memory("cuda:0"):
            transfer.register(Region("kv", memory.address, memory.length, "cuda:0"))
    finally:
        transfer.close()
    assert str(refused.value).startswith(
        "the KV pages on cuda:0 cannot be transferred: region 'kv' cannot be registered: "
    )
    assert "ucx_info -d" in str(refused.value)
