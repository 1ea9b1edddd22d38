"""Trial of one client against a stack: installed by itself in pinned versions, run once."""

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.clients.table import SCRIPTS, Client

INSTALL_S: Final = 600.0
SCRIPT_S: Final = 300.0
KEY: Final = "none"
"""The API key that clients send: a stack without keys takes any."""


@dataclass(frozen=True, slots=True)
class Outcome:
    client: str
    versions: tuple[str, ...]
    ok: bool
    answers: tuple[str, ...]
    """Lines that the script printed, one for each request with its answer."""
    error: str = ""
    """Last line of the error."""


class NotInstalled(Exception):
    """Raised when a package registry does not give a package, or when the installer is missing."""


def tried(client: Client, url: str, model: str, cache: Path) -> Outcome:
    """`url`: of a stack that serves `model`. Raises NotInstalled."""
    home = installed(client, cache)
    command = [str(home / "bin" / "python"), str(SCRIPTS / client.script)]
    if client.is_node:  # it looks for packages beside the script
        own = home / client.script
        own.write_bytes((SCRIPTS / client.script).read_bytes())
        command = ["node", str(own)]
    work = home / "work"
    work.mkdir(exist_ok=True)
    told = {"OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url, "MODEL": model}
    keys = {"OPENAI_API_KEY": KEY, "ANTHROPIC_API_KEY": KEY}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            [*command, *client.arguments],
            cwd=work,
            env=environ | told | keys,
            capture_output=True,
            text=True,
            timeout=SCRIPT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(client.name, client.packages, False, (), f"no end within {SCRIPT_S:g} s")
    answers = tuple(done.stdout.strip().splitlines())
    error = "" if done.returncode == 0 else _last(done.stderr)
    return Outcome(client.name, client.packages, done.returncode == 0, answers, error)


def installed(client: Client, cache: Path) -> Path:
    """Return the client's virtual environment or npm folder, made if missing. Raises NotInstalled."""
    digest = hashlib.sha256(" ".join(client.packages).encode()).hexdigest()
    home = cache / f"{Path(client.script).stem}-{digest[:12]}"
    done = home / "installed"
    if not done.exists():
        home.mkdir(parents=True, exist_ok=True)
        for command in _installing(client, home):
            try:
                ran = subprocess.run(
                    command, cwd=home, capture_output=True, text=True, timeout=INSTALL_S, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise NotInstalled(f"{client.name}: {error}") from None
            if ran.returncode:
                raise NotInstalled(f"{client.name}: {_last(ran.stderr)}")
        done.touch()
    return home


def _installing(client: Client, home: Path) -> list[list[str]]:
    if client.is_node:
        return [["npm", "init", "--yes"], ["npm", "install", "--silent", "--no-fund", *client.packages]]
    python = str(home / "bin" / "python")
    return [
        [sys.executable, "-m", "venv", str(home)],
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *client.packages],
    ]


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip() and not line.startswith("Node.js v")]
    said = [line for line in lines if "Error" in line or "Exception" in line]
    return (said or lines or ["it said nothing"])[-1][:400]
