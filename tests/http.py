"""An HTTP client and request bodies for tests."""

import os
import ssl
from collections.abc import Sequence
from functools import cache
from typing import Any

import httpx


def web() -> httpx.Client:
    """The one client of this process that trusts whom it is told to now.

    Each of httpx's own functions makes another, which reads the certificates of all authorities: 50 ms of a
    core, more than a whole poll may take. As with those, each request has a connection of its own.
    """
    return _client(os.environ.get("SSL_CERT_FILE"))


def greedy(model: str, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """What asks `/v1/completions` for exactly so many of the likeliest tokens, and for their ids."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


@cache
def _client(authorities: str | None) -> httpx.Client:
    return httpx.Client(
        trust_env=False,
        verify=ssl.create_default_context(cafile=authorities) if authorities else True,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )
