"""Tests that flags win over variables, variables over defaults, and nothing misspelt passes."""

from dataclasses import replace

import pytest

from baton.bootstrap.settings import BootstrapSettings
from baton.decode.settings import DecodeSettings
from baton.prefill.settings import PrefillSettings
from baton.runtime.errors import EXIT_USAGE, SettingsError
from baton.runtime.settings import load, settings_of, to_flags, variables_of

Service = type[BootstrapSettings] | type[PrefillSettings] | type[DecodeSettings]
SERVICES: tuple[Service, ...] = (BootstrapSettings, PrefillSettings, DecodeSettings)
NOTHING_IS_A_MISTAKE = {
    "api_keys",
    "api_key_file",
    "admin_api_keys",
    "admin_api_key_file",
    "run_token",
    "reasoning_key",
}
"""Settings that must not be given empty, since an empty list would mean an open API."""


def test_a_flag_wins_over_a_variable_which_wins_over_the_default() -> None:
    environ = {"BATON_KV_CACHE_MEMORY": "2GiB"}
    assert load(PrefillSettings, {}, {}).kv_cache_memory == 2**30
    assert load(PrefillSettings, {}, environ).kv_cache_memory == 2 * 2**30
    assert load(PrefillSettings, {"kv_cache_memory": "512MiB"}, environ).kv_cache_memory == 2**29
    assert load(PrefillSettings, {"kv_cache_memory": None}, environ).kv_cache_memory == 2 * 2**30


def test_a_flag_equal_to_the_default_still_wins_over_a_variable() -> None:
    assert load(DecodeSettings, {"max_running": "64"}, {"BATON_MAX_RUNNING": "8"}).max_running == 64


def test_a_bad_flag_is_named_with_what_is_allowed() -> None:
    with pytest.raises(SettingsError, match=r"^--dtype: 'int4' is not allowed: use one of auto, bfloat16"):
        load(PrefillSettings, {"dtype": "int4"}, {})


def test_a_bad_variable_is_named_rather_than_its_flag() -> None:
    with pytest.raises(SettingsError, match=r"^BATON_LEASE_MS: 'soon' is not allowed: use a positive time"):
        load(BootstrapSettings, {}, {"BATON_LEASE_MS": "soon"})


def test_a_password_in_a_url_that_is_not_allowed_is_not_shown() -> None:
    with pytest.raises(
        SettingsError, match=r"^BATON_OTLP_ENDPOINT: 'http://…@c:4317' is not allowed"
    ) as caught:
        load(BootstrapSettings, {}, {"BATON_OTLP_ENDPOINT": "http://user:secret@c:4317"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["rooms_kept", "failed_rooms_kept"])
def test_rooms_are_kept_in_bounded_numbers(name: str) -> None:
    assert getattr(load(BootstrapSettings, {name: "100000"}, {}), name) == 100_000
    with pytest.raises(SettingsError, match="a whole number from 1 to 100000"):
        load(BootstrapSettings, {name: "100001"}, {})


def test_an_overridden_variable_is_not_read() -> None:
    assert load(BootstrapSettings, {"lease_ms": "1s"}, {"BATON_LEASE_MS": "soon"}).lease_ms == 1_000


def test_an_overlong_value_is_cut_in_the_message() -> None:
    with pytest.raises(SettingsError) as caught:
        load(PrefillSettings, {"dtype": "x" * 10_000}, {})
    assert len(str(caught.value)) < 300


def test_a_misspelt_variable_is_an_error_that_suggests_the_nearest() -> None:
    with pytest.raises(
        SettingsError, match=r"BATON_KV_CACHE_MEMROY is unknown; did you mean BATON_KV_CACHE_MEMORY\?"
    ):
        load(PrefillSettings, {}, {"BATON_KV_CACHE_MEMROY": "1GB"})


def test_a_variable_of_another_service_is_no_mistake() -> None:
    environ = {"BATON_MAX_RUNNING": "8"}
    with pytest.raises(SettingsError, match="BATON_MAX_RUNNING"):
        load(PrefillSettings, {}, environ)
    load(PrefillSettings, {}, environ, variables_of(*SERVICES))


def test_a_former_name_of_a_variable_is_read_unless_the_new_one_is_given() -> None:
    old, new = "BATON_THOUGHTS_KEY_FILE", "BATON_REASONING_KEY_FILE"
    required = {"model": "m"}
    assert load(BootstrapSettings, required, {old: "old"}).reasoning_key_file == "old"
    assert load(BootstrapSettings, required, {old: "old", new: "new"}).reasoning_key_file == "new"
    flag = {"reasoning_key_file": "flag"}
    assert load(BootstrapSettings, required | flag, {old: "old", new: "new"}).reasoning_key_file == "flag"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("BATON_BOOTSTRAP_SERVICE_HOST", "10.0.0.1"),
        ("BATON_BOOTSTRAP_SERVICE_PORT_GRPC", "8100"),
        ("BATON_BOOTSTRAP_PORT", "tcp://10.0.0.1:8000"),
        ("BATON_BOOTSTRAP_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("BATON_BOOTSTRAP_PORT_8000_TCP_ADDR", "10.0.0.1"),
    ],
)
def test_a_kubernetes_service_link_is_explained(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match="enableServiceLinks: false"):
        load(PrefillSettings, {}, {variable: value})


def test_a_misspelt_port_is_no_service_link() -> None:
    with pytest.raises(
        SettingsError, match=r"BATON_METRIC_PORT is unknown; did you mean BATON_METRICS_PORT\?"
    ):
        load(PrefillSettings, {}, {"BATON_METRIC_PORT": "1"})


def test_foreign_variables_are_left_alone() -> None:
    load(PrefillSettings, {}, {"PATH": "/bin", "BATONS": "1"})


def test_an_unknown_flag_suggests_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"--chunk-token is unknown; did you mean --chunk-tokens\?"):
        load(PrefillSettings, {"chunk_token": "1"}, {})


def test_a_settings_error_is_a_usage_error() -> None:
    assert SettingsError("x").exit_code == EXIT_USAGE


@pytest.mark.parametrize("cls", SERVICES)
def test_every_default_is_a_value_that_its_kind_reads_back(cls: Service) -> None:
    for each in settings_of(cls):
        assert each.help.endswith("."), each.name
        if each.name not in NOTHING_IS_A_MISTAKE:
            assert each.kind.parse(each.default_text) == each.default, each.name


@pytest.mark.parametrize("cls", SERVICES)
def test_defaults_need_no_flags(cls: Service) -> None:
    flags = to_flags(replace(load(cls, {}, {})))
    assert set(flags[::2]) <= {"--advertise", "--grpc-host", "--name"}


def test_flags_made_from_settings_load_to_the_same_settings() -> None:
    settings = load(
        DecodeSettings,
        {"name": "decode-1", "cpus": "0,2-5", "kv_cache_memory": "1500MiB", "transfer_timeout_ms": "1500ms"},
        {"BATON_BOOTSTRAP": "[::1]:9000"},
    )
    flags = to_flags(settings)
    named = {flag[2:].replace("-", "_"): text for flag, text in zip(flags[::2], flags[1::2], strict=True)}
    assert load(DecodeSettings, named, {}) == settings


def test_peers_get_the_listen_address_unless_another_is_given() -> None:
    assert load(PrefillSettings, {"host": "10.0.0.7"}, {}).advertise == "10.0.0.7"
    assert load(PrefillSettings, {"host": "0.0.0.0", "advertise": "10.0.0.7"}, {}).advertise == "10.0.0.7"


def test_the_bootstrap_takes_no_address_for_peers_since_workers_are_told_where_it_is() -> None:
    with pytest.raises(SettingsError, match="--advertise is unknown"):
        load(BootstrapSettings, {"advertise": "10.0.0.7"}, {})


def test_workers_register_at_the_listen_address_unless_another_is_given() -> None:
    assert load(BootstrapSettings, {"host": "10.0.0.7"}, {}).grpc_host == "10.0.0.7"
    assert load(BootstrapSettings, {"host": "10.0.0.7", "grpc_host": "::1"}, {}).grpc_host == "::1"


def test_a_worker_that_listens_everywhere_needs_an_address_for_its_peers() -> None:
    with pytest.raises(SettingsError, match="--advertise is needed with --host"):
        load(DecodeSettings, {"host": "0.0.0.0"}, {})


def test_a_worker_without_a_name_takes_its_role_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    assert load(DecodeSettings, {}, {}).name == "decode-node7"
    assert load(PrefillSettings, {}, {}).name == "prefill-node7"
