"""Start-up error for KV memory that the transfer backend cannot register."""

from collections.abc import Iterator
from contextlib import contextmanager

from baton.runtime.errors import StartupError
from baton.transfer.nixl_library import describe_settings
from baton.transfer.transfer_protocol import TransferError


@contextmanager
def explain_refused_memory(device: str) -> Iterator[None]:
    """Context manager that turns a TransferError into a StartupError of one line.

    It surrounds the first registration of KV memory. `device`: "cpu" or "cuda:N".
    """
    try:
        yield
    except TransferError as error:
        settings = describe_settings()
        text = f"the KV pages on {device} cannot be transferred: {error}"
        if settings not in text:
            text += settings
        if device.startswith("cuda"):
            text += "; NIXL's UCX needs its CUDA transports, which `ucx_info -d` lists where they are there"
        raise StartupError(text) from error
