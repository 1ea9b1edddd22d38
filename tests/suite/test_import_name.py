"""Tests of the package's import name."""

import subprocess
import sys
from pathlib import Path

import baton

ROOT = Path(__file__).parents[2]


def test_the_package_is_the_folder_services() -> None:
    assert Path(baton.__file__).resolve() == ROOT / "services" / "__init__.py"


def test_the_folder_cannot_be_imported_by_its_own_name() -> None:
    """Two copies of one module in a process would compare as unequal."""
    command = [sys.executable, "-c", "import services.ids"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "import this package as `baton`, not as `services`" in ran.stderr
