"""Which web pages of other origins may ask, and read what they are answered? (CORS.)

A browser asks first (a preflight), with no key: it is answered before the door. What the door refuses is for
the page to read, too. No cookie and no password that a browser keeps counts for another origin.
"""

from collections.abc import Sequence
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

METHODS: Final = ("GET", "POST", "DELETE")
TOLD: Final = ("x-request-id", "request-id", "retry-after")
"""Headers of an answer that a page may read, beside those that every page may."""
PREFLIGHT_S: Final = 600
"""For so long a browser may remember its answer."""


def open_to(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app`, for pages of `origins`, too; of any, where `*` is among them. Pure ASGI: it hides no hang-up."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=METHODS,
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=TOLD,
        max_age=PREFLIGHT_S,
    )
