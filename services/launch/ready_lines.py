"""Lines that `baton serve` shows when the stack is ready, with example commands."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from baton.launch.serve_settings import DEFAULT_URL
from baton.launch.stack_plan import Operators
from baton.runtime.child_process import COMMAND

NO_OPERATORS: Final = (
    "The pages for operators (/ui, baton top) are closed: with several API keys they need"
    " --admin-api-key-file, --admin-port or --open-admin"
)


def ready_lines(
    url: str,
    model: str,
    tls_dir: str = "",
    *,
    needs_key: bool = False,
    has_admin_port: bool = False,
    admin_urls: Sequence[str] = (),
    operators: Operators = Operators.CALLERS,
    sampling: Mapping[str, Any] = MappingProxyType({}),
    metrics: Sequence[str] = (),
) -> list[str]:
    """Return the lines that show the stack's address and commands to try.

    `needs_key`: whether the API asks for a key. `has_admin_port`: whether the pages for operators have a port
    of their own. `admin_urls`: those of each bootstrap, if there are several. `operators`: which callers may
    read those pages. `sampling`: the model's own sampling parameters, for requests that give none. `metrics`:
    each worker's metrics page, if the ports were given.
    """
    baton = command_words(sys.argv[0])
    question = "What is the capital of France?"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": question}]})
    to = "" if url == DEFAULT_URL else f" --url {url}"
    curl, exports = "curl", []
    if needs_key:
        exports.append("  export OPENAI_API_KEY=…  # one of the API's keys")
        curl += ' -H "Authorization: Bearer $OPENAI_API_KEY"'
    if tls_dir:
        folder = shlex.quote(os.path.abspath(tls_dir))  # noqa: PTH100
        exports.append(f"  export SSL_CERT_FILE={folder}/ca.crt")
        curl += ' --cacert "$SSL_CERT_FILE"'
    if operators is Operators.ADMINS and not has_admin_port:
        exports.append("  export BATON_ADMIN_API_KEYS=…  # an admin key, for the pages for operators")
    pages = f"What it does, and any request's story: {url}/ui or {baton} top{to}"
    if operators is Operators.NOBODY:
        pages = NO_OPERATORS
    defaults = ", ".join(f"{name} {value}" for name, value in sampling.items())
    return [
        f"Ready: {model} on {url}",
        *([f"Where a request does not say it, as the model recommends: {defaults}"] if defaults else []),
        "",
        *exports,
        f"  {curl} {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        f"  {baton} chat{to} {shlex.quote(question)}",
        *([] if has_admin_port else ["", pages]),
        *(["", f"Pages for operators, at any bootstrap: {_joined(admin_urls)}"] if admin_urls else []),
        *(["", f"Metrics of the workers: {', '.join(metrics)}"] if metrics else []),
        "",
        "Ctrl-C stops it.",
    ]


def _joined(urls: Sequence[str]) -> str:
    return ", ".join(f"{url}/ui" for url in urls)


def command_words(program: str) -> str:
    """Return the shell words that run this program again from any directory. `program`: its `sys.argv[0]`."""
    script, found = os.path.abspath(program), shutil.which("baton")  # noqa: PTH100 - a link is not followed
    if found and os.path.realpath(found) == os.path.realpath(script):
        return "baton"
    if script.endswith(".py"):
        return f"{shlex.quote(sys.executable)} -m {COMMAND}"
    return shlex.quote(script)
