"""Tests that children run this package, whatever the working directory and the environment contain."""

import os
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from baton.grammars.grammar_check import GrammarChecker
from baton.launch import child
from baton.models import conversion_cache
from baton.models.conversion_cache import convert_once
from baton.rooms.request import Grammar, GrammarKind
from baton.runtime.child_process import child_environ, module_command
from tests.api import tiny

SERVICES: Final = Path(__file__).parents[2] / "services"
NO_CHILD_OF_THIS_PACKAGE: Final = {
    "launch/ready_lines.py",  # a command that a person is shown
    "runtime/child_process.py",
}
DIGITS: Final = Grammar(GrammarKind.REGEX, "[0-9]{2}")


@pytest.fixture
def other_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with packages that must not be imported, as many web projects have."""
    for name in ("services", "baton"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("print('imported'); raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path


def test_only_one_module_makes_commands_of_this_interpreter() -> None:
    named = {
        str(path.relative_to(SERVICES))
        for path in SERVICES.rglob("*.py")
        if re.search(r"sys\.executable|-m services|\"-m\"", path.read_text())
    }
    commented = {name for name in named if "sys.executable" not in (SERVICES / name).read_text()}
    assert named - commented == NO_CHILD_OF_THIS_PACKAGE


def test_every_process_of_this_package_is_given_its_environment() -> None:
    """Each module that builds a command for a child process starts it with the environment for it."""
    starts = re.compile(r"subprocess\.(Popen|run)|create_subprocess_exec")
    lacking = [
        str(path.relative_to(SERVICES))
        for path in SERVICES.rglob("*.py")
        if starts.search(text := path.read_text()) and "_command(" in text and "child_environ(" not in text
    ]
    assert lacking == []


def test_grammars_are_compiled_by_this_package(other_project: Path) -> None:
    backend = tiny.byte_level().backend_tokenizer
    judge = GrammarChecker(backend, backend.get_vocab_size(), (0,))
    try:
        assert judge.check(DIGITS, False) == DIGITS
    finally:
        judge.close()


def test_a_model_is_converted_by_this_package(other_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(other_project / "cache"))
    monkeypatch.setattr(conversion_cache, "CONVERTER", "tests.models.converter")
    file = other_project / "Some-Model.Q4_K_M.gguf"
    file.write_text("GGUF ok")
    assert (convert_once(file, "Some-Model", lambda _: None) / "config.json").is_file()


def test_a_part_of_the_stack_imports_this_package(other_project: Path) -> None:
    command = module_command("baton.cli.main", "version")
    environ = child.child_environ(os.environ)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("baton "), done


def test_variables_that_change_what_libraries_do_are_not_inherited() -> None:
    environ = child_environ({"PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error", "PYTHONPATH": "/x", "A": "b"})
    assert environ == {
        "A": "b",
        "PYTHONPATH": f"{SERVICES.parent}{os.pathsep}/x",
        "PYTHONSAFEPATH": "1",
    }
