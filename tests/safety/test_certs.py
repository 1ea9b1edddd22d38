"""Tests of the files that `baton certs` writes, and of what it refuses."""

import sys
from pathlib import Path

import pytest
from cryptography import x509

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
    assert names_in(tmp_path / "http.crt") == ["localhost", "baton.example", "192.0.2.7"]
    assert names_in(tmp_path / "prefill.crt") == ["prefill.baton.internal"]
    assert names_in(tmp_path / "worker.crt") == ["prefill.baton.internal", "decode.baton.internal"]


def names_in(file: Path) -> list[str]:
    """Return the host names and the addresses that a certificate is for."""
    read = x509.load_pem_x509_certificate(file.read_bytes())
    names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [
        *names.get_values_for_type(x509.DNSName),
        *map(str, names.get_values_for_type(x509.IPAddress)),
    ]


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
