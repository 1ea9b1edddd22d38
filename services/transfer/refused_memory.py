"""What is said where a worker's memory cannot be given to the transfer at its start?"""

from collections.abc import Iterator
from contextlib import contextmanager

from baton.runtime.errors import StartupError
from baton.transfer.nixl_library import describe_settings
from baton.transfer.transfer_protocol import TransferError


@contextmanager
def explain_refused_memory(device: str) -> Iterator[None]:
    """While the memory of `device` ("cpu", "cuda:N") is first made known: raises StartupError, in one line,
    where the transfer cannot be loaded or does not take it."""
    try:
        yield
    except TransferError as error:
        said = describe_settings()
        text = f"the KV pages on {device} cannot be transferred: {error}"
        if said not in text:
            text += said
        if device.startswith("cuda"):
            text += "; NIXL's UCX needs its CUDA transports, which `ucx_info -d` lists where they are there"
        raise StartupError(text) from error
