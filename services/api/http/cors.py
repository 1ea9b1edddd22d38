"""CORS: which web pages from other origins may call the API and read its responses.

A browser first sends a preflight request without a key. It is answered before authentication. A page from an
allowed origin may also read error responses. Cookies, and passwords that a browser has stored, are not
accepted from other origins.
"""

from collections.abc import Sequence
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

METHODS: Final = ("GET", "POST", "DELETE")
EXPOSED_HEADERS: Final = ("x-request-id", "request-id", "retry-after")
"""Response headers that a page from another origin may read, in addition to those of the CORS standard."""
PREFLIGHT_S: Final = 600
"""Seconds for which a browser may cache the response to a preflight request."""


def open_to(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return `app` with CORS for `origins`, where `*` allows any origin. The wrapper is pure ASGI, so client
    disconnects still reach the application."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=METHODS,
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=EXPOSED_HEADERS,
        max_age=PREFLIGHT_S,
    )
