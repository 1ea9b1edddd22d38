"""CORS: which web pages of other origins may call the API and read its answers.

A browser first sends a preflight without a key, which is answered before authentication. Pages may read
refusals, too. Cookies and passwords that a browser remembers count for no other origin.
"""

from collections.abc import Sequence
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

METHODS: Final = ("GET", "POST", "DELETE")
EXPOSED_HEADERS: Final = ("x-request-id", "request-id", "retry-after")
"""Response headers that a page may read, in addition to the browser's own list."""
PREFLIGHT_S: Final = 600
"""Time for which a browser may remember the answer of a preflight."""


def open_to(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return `app` with CORS for `origins`; `*` among them allows any. Pure ASGI: it hides no disconnect."""
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
