"""Trials of unmodified clients against a running stack.

python -m tests.clients [NAME …]

Each is installed by itself, from its registry, into `--cache`, and runs its script from `scripts`
against `--url` or a stack of the demo model that this starts. One JSON line for each; the exit code says
whether all of them worked. `--table` prints the rows of docs/clients.md instead. It takes minutes, a
network and, for some of them, Node: no test runs it.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import httpx

from baton.models.model_files import DEMO, prepare, resolve
from baton.runtime.model_options import LoadFormat
from tests.clients.long_model import write_long_model
from tests.clients.page import row
from tests.clients.table import CLIENTS, Client
from tests.clients.trial import NotInstalled, Outcome, tried
from tests.process.stack import running_stack

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "baton" / "clients"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    names = [client.name for client in CLIENTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"without, all: {', '.join(names)}")
    parser.add_argument("--url", help="of a stack that runs already, such as http://127.0.0.1:8000")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where clients are installed (%(default)s)")
    parser.add_argument("--table", action="store_true", help="rows of docs/clients.md instead of JSON")
    args = parser.parse_args()
    if unknown := sorted({*args.names} - {*names}):
        parser.error(f"no client is called {', '.join(unknown)}")
    failed = 0
    chosen = [client for client in CLIENTS if not args.names or client.name in args.names]
    for is_long in (False, True):
        clients = [client for client in chosen if client.has_long_prompts is is_long]
        if clients:
            with _stack(args.url, is_long=is_long) as url:
                failed += sum(not _try(client, url, args) for client in clients)
    return min(failed, 1)


def _try(client: Client, url: str, args: argparse.Namespace) -> bool:
    """Write what came of one client, and return whether it works."""
    model = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
    try:
        outcome = tried(client, url, model, args.cache)
    except NotInstalled as error:
        outcome = Outcome(client.name, client.packages, False, (), f"not installed: {error}")
    sys.stdout.write((row(client, outcome) if args.table else json.dumps(asdict(outcome))) + "\n")
    sys.stdout.flush()
    return outcome.ok


@contextmanager
def _stack(url: str | None, *, is_long: bool) -> Iterator[str]:
    """`url`, or that of a stack that ends with this: of the demo model, or of `long_model`."""
    if url is not None:
        yield url.rstrip("/")
        return
    demo = prepare(resolve(DEMO, LoadFormat.AUTO), lambda _: None)
    with TemporaryDirectory(prefix="baton-long-model-") as folder:
        model = write_long_model(demo, Path(folder)) if is_long else demo
        loads = {"load_format": (LoadFormat.DUMMY if is_long else LoadFormat.AUTO).value}
        with running_stack(str(model), prefill=[loads], decode=[loads], bootstrap=loads) as stack:
            yield stack.url


if __name__ == "__main__":
    sys.exit(main())
