"""Tests of the commands as typed: help, mistakes, and modules that stay unloaded."""

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from baton.decode.settings import DecodeSettings
from baton.launch.serve_settings import FIRST_DAY
from baton.runtime.settings import settings_of
from tests.cli.typed import baton
from tests.ports import free_port


def one_line_error(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode != 0
    assert result.stderr.startswith("baton: error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_help_lists_the_commands() -> None:
    result = baton("--help")
    assert result.returncode == 0
    for word in ("serve", "bootstrap", "prefill", "decode", "chat", "version"):
        assert f" {word} " in result.stdout


def test_help_of_a_service_shows_every_setting_with_its_default() -> None:
    text = baton("decode", "--help").stdout
    for each in settings_of(DecodeSettings):
        assert (each.flag in text) is not each.secret, (
            "a secret is no flag: a command line shows it to everybody"
        )
    assert "(default: 1GiB)" in " ".join(text.replace("│", "").split())


def test_a_former_flag_is_taken_for_the_new_one() -> None:
    for flag in ("--describe-tools", "--tell-tools"):
        result = baton("bootstrap", flag, "perhaps")
        assert result.returncode == 2
        assert "--describe-tools: 'perhaps' is not allowed" in result.stderr


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from baton.cli.main import app\n"
        "try: app(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'grpc', 'httpx', 'fastapi', 'nixl'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("module", ["serve", "rank_processes"])
def test_the_supervisor_and_the_launcher_load_no_tensors_and_no_grpc(module: str) -> None:
    script = (
        f"import sys, baton.launch.{module}\n"
        "print(sorted({'torch', 'transformers', 'grpc'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("command", ["chat", "version"])
def test_a_python_without_docstrings_is_refused_in_one_line(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton.cli.main", command],
        env={**os.environ, "PYTHONOPTIMIZE": "2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "PYTHONOPTIMIZE=2" in one_line_error(done)


def test_warnings_that_a_variable_makes_errors_are_none() -> None:
    script = (
        "import warnings; from baton.cli import main\n"
        "main.app = lambda: warnings.warn('old', stacklevel=1); main.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "dropped from the environment, as docs/settings.md says: PYTHONWARNINGS" in done.stderr
    assert "UserWarning: old" in done.stderr


def test_a_directory_that_is_gone_is_one_line(tmp_path: Path) -> None:
    script = 'cd "$0" && rmdir "$0" && exec "$1" -P -m baton.cli.main bootstrap'
    result = subprocess.run(
        ["sh", "-c", script, str(tmp_path), sys.executable],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "the directory that this was started in cannot be used" in one_line_error(result)


@pytest.mark.parametrize("command", ["bootstrap", "prefill", "decode", "serve"])
def test_a_bad_value_is_one_line_that_names_the_flag(command: str) -> None:
    result = baton(command, "--drain-timeout-ms", "never")
    assert "--drain-timeout-ms: 'never' is not allowed" in one_line_error(result)
    assert result.returncode == 2


@pytest.mark.parametrize("command", ["bootstrap", "prefill", "decode", "serve", "chat"])
def test_a_misspelt_variable_is_one_line_that_suggests_the_right_one(command: str) -> None:
    result = baton(command, environ={"BATON_LOG_LEVLE": "debug"})
    assert "BATON_LOG_LEVLE is unknown; did you mean BATON_LOG_LEVEL?" in one_line_error(result)


def test_an_unknown_flag_is_a_usage_error() -> None:
    result = baton("prefill", "--chunk-token", "5")
    assert result.returncode == 2
    assert "--chunk-token" in result.stderr


@pytest.mark.parametrize("flag", ["--max-model-len", "--max-model-len=4096"])
def test_a_peers_flag_is_answered_with_what_to_give_instead(flag: str) -> None:
    result = baton("serve", flag, "4096")
    assert "--max-model-len is not a flag of baton serve: give --context-length" in one_line_error(result)
    assert result.returncode == 2


def test_the_help_of_serve_begins_with_what_the_first_day_needs() -> None:
    text = baton("serve", "--help").stdout
    places = [text.index(f" --{name.replace('_', '-')} ") for name in FIRST_DAY]
    assert places == sorted(places)
    assert places[-1] < text.index("The stack")
    assert [text.count(f"│ --{name.replace('_', '-')} ") for name in FIRST_DAY] == [1] * len(FIRST_DAY)


def test_serving_on_a_busy_port_fails_before_anything_slow() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = baton("serve", "--port", str(port), "--grpc-port", "0")
    assert f"port {port} on 127.0.0.1 is in use" in one_line_error(result)
    assert "--port" in result.stderr
    assert result.stdout == ""


def test_an_address_to_register_at_that_is_elsewhere_is_named() -> None:
    result = baton("bootstrap", "--http-port", "0", "--grpc-host", "192.0.2.1")
    assert result.returncode == 1
    assert "192.0.2.1 is not an address of this machine: choose another with --grpc-host" in result.stderr


def test_serving_with_one_port_for_two_things_fails_before_anything_slow() -> None:
    port = str(free_port())
    result = baton("serve", "--port", port, "--grpc-port", "0", "--metrics-port", port)
    assert f"port {port} on 127.0.0.1 is in use" in one_line_error(result)
    assert "--metrics-port" in result.stderr


NO_FIELDS: Final = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)
"""A GGUF file without any field."""


def test_what_a_terminal_has_no_letters_for_keeps_nothing_from_starting(tmp_path: Path) -> None:
    ascii_alone = {"PYTHONIOENCODING": "ascii"}
    model = tmp_path / "modèle.gguf"
    model.write_bytes(NO_FIELDS)
    ports = "--port", str(free_port()), "--grpc-port", "0"
    result = baton(
        "serve", *ports, "--model", str(model), environ=ascii_alone | {"XDG_CACHE_HOME": str(tmp_path)}
    )
    assert result.stdout.startswith("? preparing the model ")
    assert "le.gguf failed" in one_line_error(result)


def test_a_file_that_a_terminal_has_no_letters_for_is_prepared(tmp_path: Path) -> None:
    file = tmp_path / "modèle.gguf"
    file.write_bytes(NO_FIELDS)
    result = subprocess.run(
        [sys.executable, "-m", "baton.launch.prepare_model", str(file), "auto"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout.startswith("progress: converting mod?le.gguf")
    assert "le.gguf failed" in one_line_error(result)


def test_a_flag_of_a_part_is_refused_with_the_one_to_give() -> None:
    result = baton("serve", "--tp", "2")
    assert "--tp is not taken by baton serve" in one_line_error(result)
    assert "give --prefill-tp and --decode-tp" in result.stderr
    assert result.returncode == 2
    assert " --tp " not in baton("serve", "--help").stdout


def test_serving_without_the_certificates_that_were_named_fails_before_anything_slow(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    text = one_line_error(baton("serve", "--tls-dir", str(missing)))
    assert f"--tls-dir {missing}: there is no such directory; `baton certs {missing}` makes" in text


def test_version_is_one_line() -> None:
    result = baton("version")
    assert result.returncode == 0
    assert result.stdout.startswith("baton ")
