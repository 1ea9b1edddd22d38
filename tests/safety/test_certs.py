"""Tests of the files that `baton certs` writes, and of what it refuses."""

import ssl
import sys
from pathlib import Path

import pytest

from baton.cli.certs import CertsRefused, make_certs
from tests.cli.typed import baton

MADE = {
    f"{name}.{end}"
    for name in ("ca", "bootstrap", "prefill", "decode", "worker", "http")
    for end in ("crt", "key")
}


def test_a_development_authority_is_made_once_and_its_keys_are_the_owners(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "certs"
    result = baton("certs", str(folder), "--name", "baton.example", "--name", "192.0.2.7", "--days", "2")
    assert result.returncode == 0, result.stderr
    assert {path.name for path in folder.iterdir()} == MADE
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in folder.iterdir():
        expected = 0o600 if path.suffix == ".key" else 0o644
        assert path.stat().st_mode & 0o777 == expected, path.name
        assert path.suffix == ".crt" or path.read_text() not in result.stdout
    assert f"--tls-dir {folder}" in result.stdout
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    again = baton("certs", str(folder))
    assert again.returncode == 1
    assert "choose another place, or replace all with --force" in again.stderr
    assert {path: path.read_bytes() for path in folder.iterdir()} == kept
    assert baton("certs", str(folder), "--force").returncode == 0
    assert all(path.read_bytes() != text for path, text in kept.items())


def test_the_certificate_of_the_api_has_the_names_that_were_asked_for(tmp_path: Path) -> None:
    make_certs(tmp_path, ["localhost", "baton.example", "192.0.2.7", "localhost"])
    told = ssl._ssl._test_decode_cert(str(tmp_path / "http.crt"))  # type: ignore[attr-defined]
    assert told["subjectAltName"] == (
        ("DNS", "localhost"),
        ("DNS", "baton.example"),
        ("IP Address", "192.0.2.7"),
    )
    told = ssl._ssl._test_decode_cert(str(tmp_path / "prefill.crt"))  # type: ignore[attr-defined]
    assert told["subjectAltName"] == (("DNS", "prefill.baton.internal"),)
    told = ssl._ssl._test_decode_cert(str(tmp_path / "worker.crt"))  # type: ignore[attr-defined]
    assert told["subjectAltName"] == (("DNS", "prefill.baton.internal"), ("DNS", "decode.baton.internal"))


@pytest.mark.parametrize("name", ["", "two words", "http://here", "a@b", "hôte"])
def test_what_is_no_name_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(CertsRefused, match="is neither a host name nor an address"):
        make_certs(tmp_path, [name])
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "baton.cli.authority", None)
    with pytest.raises(CertsRefused, match=r"pip install cryptography$"):
        make_certs(tmp_path / "certs", ["localhost"])
    assert not (tmp_path / "certs").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CertsRefused, match=r"file.* cannot be written"):
        make_certs(tmp_path / "file" / "certs", ["localhost"])
