"""Packages that an installation brings, of those installed here."""

import re
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Final, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.chart import ROOT

LISTS: Final = ROOT / "requirements"
REQUIREMENTS: Final = ROOT / "deploy" / "bootstrap-requirements.txt"
WORKERS_ALONE: Final = frozenset({"torch", "nixl"})


class Pin(NamedTuple):
    requirement: Requirement
    hashes: list[str]
    """Hashes in pip's form: `--hash=sha256:…`."""


def project() -> dict[str, list[str]]:
    """Return what pyproject.toml names: dependencies under "", extras under their names."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": told["dependencies"], **told["optional-dependencies"]}


def bootstrap_requirements() -> list[str]:
    lines = [line.strip() for line in REQUIREMENTS.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def pins(name: str) -> dict[str, list[Pin]]:
    """Return the pins of a list in requirements/ by package. Several pins differ by platform."""
    found: dict[str, list[Pin]] = {}
    for block in re.split(r"\n(?=\S)", (LISTS / f"{name}.txt").read_text().strip()):
        if not block.startswith("#"):
            first, *rest = block.replace("\\\n", "\n").splitlines()
            requirement = Requirement(first)
            found.setdefault(canonicalize_name(requirement.name), []).append(
                Pin(requirement, [line.strip() for line in rest])
            )
    return found


def bootstrap_packages(folder: Path) -> Path:
    """A new directory with what the bootstrap's image has, and Baton, by links."""
    found = link_packages(folder, bootstrap_requirements())
    assert not found.keys() & {*WORKERS_ALONE, "accelerate", "gguf"}
    (folder / "baton").symlink_to(ROOT / "services")
    return folder


def link_packages(folder: Path, wanted: list[str]) -> dict[str, Distribution]:
    """Make a directory with what installing `wanted` brings, by links. Returns what is there, by its name."""
    folder.mkdir()
    found = _closure(wanted)
    for each in found.values():
        for file in each.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).is_symlink():
                (folder / top).symlink_to(Path(str(each.locate_file(top))))
    return found


def _closure(wanted: list[str]) -> dict[str, Distribution]:
    """The installed distributions that installing `wanted` brings."""
    found: dict[str, Distribution] = {}
    waiting = [(Requirement(each), extra) for each in wanted for extra in {"", *Requirement(each).extras}]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        known = name in found
        found.setdefault(name, distribution(requirement.name))
        if known and not extra:
            continue
        for text in found[name].requires or ():
            each = Requirement(text)
            applies = each.marker is None or each.marker.evaluate({"extra": extra})
            if applies and canonicalize_name(each.name) not in found:
                waiting += [(each, more) for more in {"", *each.extras}]
    return found
