"""Tests of the keys and certificates that `baton serve` gives to its parts."""

from pathlib import Path

import pytest

from baton.bootstrap.settings import BootstrapSettings
from baton.cli.main import KNOWN
from baton.decode.settings import DecodeSettings
from baton.launch.ready_lines import ready_lines
from baton.launch.serve_settings import load_serve
from baton.launch.stack_plan import BootstrapPorts, Operators, StackCommand, StackPlan, make_plan
from baton.prefill.settings import PrefillSettings
from baton.runtime.errors import SettingsError
from baton.runtime.settings import load
from baton.runtime.tls_files import TlsFiles
from tests.safety.certificates import made, of

KEY, OTHER, ADMIN = "sk-one-0123456789", "sk-two-0123456789", "sk-admin-0123456789"


def planned(flags: dict[str, str | None], environ: dict[str, str]) -> StackPlan:
    return make_plan(load_serve(flags, environ, KNOWN), flags, environ, [0, 1], [BootstrapPorts(8123)])


def named(part: StackCommand) -> dict[str, str | None]:
    flags = zip(part.flags[::2], part.flags[1::2], strict=True)
    return {flag.removeprefix("--").replace("-", "_"): text for flag, text in flags}


def test_each_part_gets_its_own_certificate_and_the_bootstrap_alone_the_keys(ours: Path) -> None:
    plan = planned({"tls_dir": str(ours)}, {"BATON_API_KEYS": KEY})
    bootstrap = load(BootstrapSettings, named(plan.bootstrap), plan.bootstrap.environ)
    assert bootstrap.api_keys == (KEY,)
    assert bootstrap.tls == of(ours, "bootstrap")
    assert bootstrap.http_tls == TlsFiles(ours / "http.crt", ours / "http.key", flags="--http-tls")
    assert (plan.tls, plan.http_tls) == (bootstrap.tls, bootstrap.http_tls)
    for cls, part in zip((PrefillSettings, DecodeSettings), plan.workers, strict=True):
        assert load(cls, named(part), {}).tls == of(ours, part.role)
        assert part.environ == {}
    assert plan.url == "https://127.0.0.1:8000"
    assert plan.api_key == KEY
    assert not any(KEY in flag for part in (plan.bootstrap, *plan.workers) for flag in part.flags)
    assert KEY not in repr(plan)


def test_the_api_may_have_a_certificate_from_elsewhere(ours: Path, strangers: Path) -> None:
    cert, key = str(strangers / "http.crt"), str(strangers / "http.key")
    plan = planned({"tls_dir": str(ours), "http_tls_cert": cert}, {"BATON_HTTP_TLS_KEY": key})
    assert plan.http_tls == TlsFiles(Path(cert), Path(key), flags="--http-tls")
    assert plan.tls == of(ours, "bootstrap")


def test_with_certificates_workers_register_where_the_api_is(ours: Path) -> None:
    plan = planned({"tls_dir": str(ours), "host": "192.0.2.7"}, {})
    assert load(BootstrapSettings, named(plan.bootstrap), {}).grpc_host == "192.0.2.7"
    assert plan.bootstrap_addresses == ("192.0.2.7:8123",)


def test_files_that_are_not_in_the_directory_are_named(tmp_path: Path) -> None:
    folder = made(tmp_path / "certs")
    for name in ("decode.key", "http.crt", "ca.key"):
        (folder / name).unlink()
    with pytest.raises(SettingsError, match=r"--tls-dir .*: decode\.key, http\.crt cannot be read there; "):
        planned({"tls_dir": str(folder)}, {})
    with pytest.raises(SettingsError, match=r": decode\.key cannot be read there; `baton certs "):
        planned({"tls_dir": str(folder), "http_tls_cert": "a", "http_tls_key": "b"}, {})


def test_a_stack_without_either_is_plain() -> None:
    plan = planned({}, {})
    assert (plan.url, plan.tls, plan.http_tls, plan.api_key) == ("http://127.0.0.1:8000", None, None, "")


def test_one_certificate_for_all_parts_is_refused() -> None:
    with pytest.raises(SettingsError, match="BATON_TLS_CERT is not taken by baton serve, only by its parts"):
        load_serve({}, {"BATON_TLS_CERT": "a"}, KNOWN)


@pytest.mark.parametrize(
    ("flags", "environ", "operators"),
    [
        ({}, {}, Operators.CALLERS),
        ({}, {"BATON_API_KEYS": KEY}, Operators.CALLERS),
        ({}, {"BATON_API_KEYS": f"{KEY},{OTHER}"}, Operators.NOBODY),
        ({"open_admin": "true"}, {"BATON_API_KEYS": f"{KEY},{OTHER}"}, Operators.CALLERS),
        ({"admin_port": "0"}, {"BATON_API_KEYS": f"{KEY},{OTHER}"}, Operators.CALLERS),
        ({}, {"BATON_API_KEYS": f"{KEY},{OTHER}", "BATON_ADMIN_API_KEYS": ADMIN}, Operators.ADMINS),
    ],
)
def test_the_plan_knows_who_reads_the_pages_for_operators(
    flags: dict[str, str | None], environ: dict[str, str], operators: Operators
) -> None:
    plan = planned(flags, environ)
    assert plan.operators is operators
    bootstrap = load(BootstrapSettings, named(plan.bootstrap), plan.bootstrap.environ)
    assert bootstrap.admin_api_keys == ((ADMIN,) if "BATON_ADMIN_API_KEYS" in environ else ())
    assert not any(ADMIN in flag for part in (plan.bootstrap, *plan.workers) for flag in part.flags)


def test_the_ready_lines_say_where_key_and_authority_go_and_not_what_the_key_is(tmp_path: Path) -> None:
    text = "\n".join(ready_lines("https://127.0.0.1:8000", "m", str(tmp_path), needs_key=True))
    assert f"export SSL_CERT_FILE={tmp_path}/ca.crt" in text
    assert '-H "Authorization: Bearer $OPENAI_API_KEY" --cacert "$SSL_CERT_FILE" https://' in text
    assert "chat --url https://127.0.0.1:8000" in text
