"""Tests of the key that signs reasoning which clients carry: read from a file, or drawn. An invalid file ends
the start."""

from pathlib import Path

import pytest

from baton.bootstrap.reasoning_key import read_reasoning_key
from baton.runtime.errors import StartupError


def test_a_files_content_is_the_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("a key of more than sixteen letters\n")
    assert read_reasoning_key(str(file)) == b"a key of more than sixteen letters"
    assert read_reasoning_key("") == b""


@pytest.mark.parametrize("content", [None, b"", b"short", b"x" * 70_000])
def test_a_file_that_holds_none_ends_the_start(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartupError, match="--reasoning-key-file"):
        read_reasoning_key(str(file))
