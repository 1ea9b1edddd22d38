"""Tests that the wheel has all of Baton but its doubles, and serves with the packages that it names alone.

Nothing is downloaded: what pip would bring is linked from where these tests run. The working tree is not on
the path of what is installed.
"""

import os
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from importlib.metadata import PathDistribution
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from baton.bootstrap.timeline.routes import FILES
from baton.models.model_files import DEMO_PACKAGE
from tests.deploy.chart import ROOT
from tests.deploy.packages import link_packages
from tests.http import web
from tests.ports import free_port
from tests.process.stack import READY_S, STOP_S

PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
POLL_S: Final = 0.1


@dataclass
class Environment:
    """Environment in which the wheel is installed."""

    folder: Path

    @property
    def programs(self) -> Path:
        return self.folder / "bin"

    @property
    def packages(self) -> Path:
        [found] = self.folder.glob("lib/python*/site-packages")
        return found

    @property
    def environ(self) -> dict[str, str]:
        """Return the variables of a process in it, without this process's settings of Python and Baton."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("BATON_", "PYTHON"))}
        return {**kept, "OMP_NUM_THREADS": "1"}

    def run(self, *command: str) -> str:
        return _run(str(self.programs / command[0]), *command[1:], cwd=self.folder, environ=self.environ)


def _run(*command: str, cwd: Path = ROOT, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    offline = ("--no-build-isolation", "--no-deps", "--no-index")
    _run(*PIP, "wheel", *offline, "--wheel-dir", str(folder), str(ROOT))
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "env", symlinks=True)
    made = Environment(folder / "env")
    at = ("--python", str(made.programs / "python"))
    _run(*PIP, *at, "install", "--no-deps", "--no-index", str(wheel))
    [own] = made.packages.glob("baton_serve-*.dist-info")
    named = [Requirement(each) for each in PathDistribution(own).requires or ()]
    wanted = [
        str(each).partition(";")[0]
        for each in named
        if each.marker is None or each.marker.evaluate({"extra": "gguf"})
    ]
    link_packages(folder / "packages", wanted)
    demo = find_spec(DEMO_PACKAGE)
    assert demo is not None
    assert demo.submodule_search_locations
    (folder / "packages" / DEMO_PACKAGE).symlink_to(demo.submodule_search_locations[0])
    (made.packages / "named.pth").write_text(f"{folder / 'packages'}\n")
    return made


def test_the_wheel_has_every_file_of_the_source_but_doubles_and_nothing_else(wheel: Path) -> None:
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = {
        str("baton" / file.relative_to(ROOT / "services"))
        for file in (ROOT / "services").rglob("*")
        if file.is_file() and file.suffix != ".so" and "__pycache__" not in file.parts
    }
    doubles = {name for name in source if name.startswith("baton/testing/")}
    assert packed == source - doubles
    assert doubles


def test_what_it_names_is_there_in_versions_that_it_allows(environment: Environment) -> None:
    _run(*PIP, "--python", str(environment.programs / "python"), "check", cwd=environment.folder)
    asked = "import baton, sys; print(baton.__file__, *sys.path, sep='\\n')"
    where = environment.run("python", "-c", asked)
    first, *path = where.splitlines()
    assert Path(first).is_relative_to(environment.packages)
    assert not any(Path(each).resolve() == ROOT for each in path if each)


@pytest.mark.stack
def test_an_installed_wheel_serves_the_demo(
    environment: Environment, demo_model_dir: Path, tmp_path: Path
) -> None:
    log, port = tmp_path / "serve.log", free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(environment.programs / "baton"), "serve", "--port", str(port), "--grpc-port", "0"]
    command += ["--kv-cache-memory", "128MiB"]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment.environ, stdout=sink, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + READY_S
        while "Ready:" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(POLL_S)
        said = environment.run("baton", "chat", "--url", url, "What is the capital of France?")
        assert "Paris" in said, log.read_text()
        for path in ("ui", *(f"ui/{name}" for name in FILES)):
            assert web().get(f"{url}/{path}").status_code == 200, path
        process.terminate()
        assert process.wait(STOP_S) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(STOP_S)
