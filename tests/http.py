"""An HTTP client and request bodies for tests."""

import os
import ssl
from collections.abc import Sequence
from functools import cache
from typing import Any

import httpx


def web() -> httpx.Client:
    """Return the HTTP client of this process that trusts the certificates in SSL_CERT_FILE, if set.

    Each of httpx's own functions makes another client, which reads the certificates of all authorities. That
    takes 50 ms of a core, more than a whole poll may take. As with those functions, each request has a
    connection of its own."""
    return _client(os.environ.get("SSL_CERT_FILE"))


def greedy(model: str, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """Return a body for `/v1/completions` that asks for exactly so many greedy tokens and their ids."""
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
