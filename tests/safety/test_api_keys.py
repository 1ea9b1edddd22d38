"""Tests of API keys whose file changes while the process runs."""

import logging
from pathlib import Path

import pytest

from baton.bootstrap.settings import BootstrapSettings
from baton.runtime.errors import SettingsError, StartupError
from baton.runtime.file_changes import LOOK_S, FileChanges
from baton.runtime.settings import load, to_environ, to_flags
from baton.web.api_keys import ADMIN_FILE_FLAG, ALLOWED, KEYS_MAX, ApiKeys, first_key

ONE, TWO, THREE = "sk-one-0123456789", "sk-two-0123456789", "sk-three-0123456789"


class Watch:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def keys(self, given: list[str], file: Path) -> ApiKeys:
        return ApiKeys(given, file, lambda paths: FileChanges(paths, lambda: self.now_s))


def write(path: Path, text: str) -> Path:
    """Write the file as editors and platforms do: another file in its place."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)
    return path


def test_keys_of_the_variable_and_the_file_are_good_and_no_others(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", f"# of the team\n{TWO}\n\n  {THREE}  \r\n")
    keys = ApiKeys([ONE], file)
    callers = [keys.caller_of(each) for each in (ONE, TWO, THREE)]
    assert None not in callers
    assert len(set(callers)) == 3, "callers are told apart"
    for wrong in ("", ONE[:-1], ONE + "0", ONE.upper(), "# of the team", "\0", "é" * 20, "\udcff" * 20):
        assert keys.caller_of(wrong) is None


def test_the_file_is_read_anew_when_it_changes_and_looked_at_once_a_second(tmp_path: Path) -> None:
    file, watch = write(tmp_path / "keys", ONE), Watch()
    keys = watch.keys([], file)
    write(file, TWO)
    watch.now_s += LOOK_S / 2
    assert keys.caller_of(ONE) is not None, "it was not looked at again yet"
    watch.now_s += LOOK_S / 2
    assert keys.caller_of(ONE) is None
    assert keys.caller_of(TWO) is not None


def test_a_line_that_is_no_key_does_not_keep_a_key_that_was_taken_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, watch = write(tmp_path / "keys", f"{ONE}\n{TWO}"), Watch()
    keys = watch.keys([], file)
    write(file, f"{TWO}\nsh ort\n")
    watch.now_s += LOOK_S
    with caplog.at_level(logging.INFO):
        assert keys.caller_of(ONE) is None
    assert keys.caller_of(TWO) is not None
    record = next(each for each in caplog.records if each.levelno == logging.ERROR)
    assert record.baton_fields == {"line": 2}  # type: ignore[attr-defined]
    assert not any(key in caplog.text for key in (ONE, TWO, "sh ort"))


def test_a_file_without_keys_lets_nobody_in_and_one_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    file, watch = write(tmp_path / "keys", ONE), Watch()
    keys = watch.keys([], file)
    file.unlink()
    watch.now_s += LOOK_S
    assert keys.caller_of(ONE) is not None
    write(file, "# nobody\n")
    watch.now_s += LOOK_S
    assert keys.caller_of(ONE) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no key"),
        ("# none\n\n", "holds no key"),
        (f"{ONE}\nsecret", "line 2: a key is 16 to 512 visible"),
        (f"{ONE} {TWO}", "line 1: a key is"),
        ("é" * 20, "line 1: a key is"),
        ("x" * 513, "line 1: a key is"),
        ("\n".join(f"{ONE}{at}" for at in range(KEYS_MAX + 1)), f"more than {KEYS_MAX} keys"),
        ("#" * 2**20 + "#", "bytes"),
    ],
    ids=["empty", "comments", "short", "two on a line", "not ascii", "long", "many", "large"],
)
def test_a_start_with_a_bad_file_ends_with_one_line_that_shows_no_key(
    tmp_path: Path, text: str, told: str
) -> None:
    file = write(tmp_path / "keys", text)
    with pytest.raises(StartupError, match=told) as refused:
        ApiKeys([], file)
    assert ONE not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--api-key-file .*keys cannot be read: No such file"):
        ApiKeys([], tmp_path / "keys")


def test_the_variable_is_no_flag_and_its_value_is_never_shown() -> None:
    settings = load(BootstrapSettings, {}, {"BATON_API_KEYS": f" {ONE}, {TWO}"})
    assert settings.api_keys == (ONE, TWO)
    assert ONE not in repr(settings)
    assert not any(ONE in word for word in to_flags(settings))
    again = load(BootstrapSettings, {}, to_environ(settings))
    assert again == settings
    with pytest.raises(SettingsError, match="--api-keys is no flag, since command lines can be read"):
        load(BootstrapSettings, {"api_keys": ONE}, {})
    with pytest.raises(SettingsError) as refused:
        load(BootstrapSettings, {}, {"BATON_API_KEYS": f"{ONE},hunter2"})
    assert str(refused.value).startswith("BATON_API_KEYS: what it holds is not allowed")
    assert ALLOWED in str(refused.value)
    assert "hunter2" not in str(refused.value)
    assert ONE not in str(refused.value)


@pytest.mark.parametrize("text", ["", " ", ",", " , ,"])
def test_a_variable_that_holds_no_key_ends_the_start_instead_of_opening_the_api(text: str) -> None:
    with pytest.raises(
        SettingsError, match=f"BATON_API_KEYS: what it holds is not allowed: use 1 to {KEYS_MAX}"
    ):
        load(BootstrapSettings, {}, {"BATON_API_KEYS": text})


@pytest.mark.parametrize(
    ("flags", "environ"),
    [({"api_key_file": ""}, {}), ({}, {"BATON_API_KEY_FILE": ""})],
    ids=["flag", "variable"],
)
def test_a_file_of_keys_without_a_name_ends_the_start_too(
    flags: dict[str, str], environ: dict[str, str]
) -> None:
    with pytest.raises(SettingsError, match="'' is not allowed: use the path of a file"):
        load(BootstrapSettings, flags, environ)


def test_pages_that_are_open_to_every_key_are_neither_an_admins_nor_on_a_port_of_their_own() -> None:
    opened = {"open_admin": "true"}
    with pytest.raises(SettingsError, match="--open-admin and admin keys"):
        load(BootstrapSettings, opened, {"BATON_ADMIN_API_KEYS": ONE})
    with pytest.raises(SettingsError, match="--open-admin and admin keys"):
        load(BootstrapSettings, {**opened, "admin_api_key_file": "keys"}, {})
    with pytest.raises(SettingsError, match="--open-admin and --admin-port"):
        load(BootstrapSettings, {**opened, "admin_port": "0"}, {})
    assert load(BootstrapSettings, opened, {"BATON_API_KEYS": f"{ONE},{TWO}"}).open_admin


def test_an_empty_list_of_admin_keys_ends_the_start_and_opens_nothing(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="BATON_ADMIN_API_KEYS: what it holds is not allowed"):
        load(BootstrapSettings, {}, {"BATON_ADMIN_API_KEYS": ""})
    with pytest.raises(StartupError, match=r"--admin-api-key-file .* holds no key"):
        ApiKeys([], write(tmp_path / "keys", "# none"), flag=ADMIN_FILE_FLAG)


def test_there_are_several_keys_once_there_was_a_second_one(tmp_path: Path) -> None:
    file, watch = write(tmp_path / "keys", f"{ONE}\n{ONE}"), Watch()
    keys = watch.keys([ONE], file)
    assert not keys.several, "one key, named three times"
    write(file, f"{ONE}\n{TWO}")
    watch.now_s += LOOK_S
    assert keys.several
    write(file, ONE)
    watch.now_s += LOOK_S
    assert keys.caller_of(TWO) is None
    assert keys.several, "what the second one asked for is still there"
    replaced = watch.keys([], file)
    write(file, THREE)
    watch.now_s += LOOK_S
    assert replaced.several


def test_whoever_starts_the_server_finds_a_key_to_ask_it_with(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", f"# two\n{TWO}\n{THREE}")
    assert first_key((), "") == ""
    assert first_key((ONE,), str(file)) == ONE
    assert first_key((), str(file)) == TWO
