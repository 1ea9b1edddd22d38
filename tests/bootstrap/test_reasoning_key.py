"""Tests of the key that signs reasoning which clients carry: read from a file, or drawn. An invalid file ends
the start."""

from pathlib import Path

import pytest

from baton.bootstrap.reasoning_key import read_reasoning_key
from baton.bootstrap.settings import BootstrapSettings
from baton.runtime.errors import StartupError
from baton.runtime.settings import load


def test_a_files_content_is_the_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("a key of more than sixteen letters\n")
    settings = load(BootstrapSettings, {"reasoning_key_file": str(file)}, {})
    assert read_reasoning_key(settings) == b"a key of more than sixteen letters"
    assert read_reasoning_key(load(BootstrapSettings, {}, {})) == b""


def test_a_variable_is_the_key_where_there_is_no_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("a key of more than sixteen letters\n")
    environ = {"BATON_REASONING_KEY": "another-key-of-a-variable"}
    assert read_reasoning_key(load(BootstrapSettings, {}, environ)) == b"another-key-of-a-variable"
    both = load(BootstrapSettings, {"reasoning_key_file": str(file)}, environ)
    assert read_reasoning_key(both) == b"a key of more than sixteen letters"


@pytest.mark.parametrize("content", [None, b"", b"short", b"x" * 70_000])
def test_a_file_that_holds_none_ends_the_start(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartupError, match="--reasoning-key-file"):
        read_reasoning_key(load(BootstrapSettings, {"reasoning_key_file": str(file)}, {}))
