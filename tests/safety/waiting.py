"""Time-outs of tests for events in another process."""

import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.process.stack import READY_S


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + READY_S
    while not holds():
        assert time.monotonic() < deadline, "never"
        time.sleep(0.05)


def answers(url: str, authority: Path) -> bool:
    try:
        context = ssl.create_default_context(cafile=str(authority / "ca.crt"))
        return httpx.get(url, verify=context, timeout=5).is_success
    except httpx.TransportError:
        return False
