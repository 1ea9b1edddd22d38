"""The text of docs/clients.md, made from the table of clients."""

from pathlib import Path
from typing import Final

from tests.clients.table import Client
from tests.clients.trial import Outcome

PAGE: Final = Path(__file__).parents[2] / "docs" / "clients.md"


def row(client: Client, outcome: Outcome) -> str:
    """Return a client's row of the page's table."""
    versions = ", ".join(f"{name} {version}" for name, version in map(_version, client.packages))
    return f"| `{client.name}` | {versions} | {client.asks} | {'works' if outcome.ok else outcome.error} |"


def _version(package: str) -> tuple[str, str]:
    name, _, version = package.replace("==", "@").rpartition("@")
    return name, version
