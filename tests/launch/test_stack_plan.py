"""Tests that `baton serve` gives each part the command line that a pod would run."""

import sys
from pathlib import Path

import pytest

from baton.bootstrap.settings import BootstrapSettings
from baton.both.settings import BothSettings
from baton.cli.main import KNOWN
from baton.decode.settings import DecodeSettings
from baton.ids import Incarnation
from baton.launch.gpus import VISIBLE
from baton.launch.ready_lines import command_words, ready_lines
from baton.launch.serve_settings import NOT_TAKEN, load_serve, passed_on
from baton.launch.stack_plan import BootstrapPorts, Operators, StackCommand, make_plan
from baton.prefill.settings import PrefillSettings
from baton.runtime.errors import SettingsError, StartupError
from baton.runtime.listening_ports import bind_port, port_of
from baton.runtime.settings import load, settings_of
from baton.wire.worker_credential import draw
from baton.worker.lifecycle.leader_host import WorkerHost


def _named(part: StackCommand) -> dict[str, str | None]:
    flags = zip(part.flags[::2], part.flags[1::2], strict=True)
    return {flag.removeprefix("--").replace("-", "_"): text for flag, text in flags}


def test_each_part_gets_the_given_settings_and_its_own_ports_and_cores() -> None:
    flags = {
        "prefill": "1",
        "decode": "2",
        "port": "9000",
        "dtype": "float32",
        "chunk_tokens": "64",
        "max_running": "4",
        "kv_checksum": "pages",
        "context_length": "4096",
    }
    environ = {"BATON_KV_CACHE_MEMORY": "256MiB", "BATON_MAX_QUEUE": "7"}
    plan = make_plan(load_serve(flags, environ, KNOWN), flags, environ, [0, 1, 2], [BootstrapPorts(8123)])

    bootstrap = load(BootstrapSettings, _named(plan.bootstrap), {})
    assert bootstrap.context_length == 4096
    assert (bootstrap.http_port, bootstrap.grpc_port, bootstrap.max_queue) == (9000, 8123, 7)
    assert [part.name for part in plan.workers] == ["prefill-0", "decode-0", "decode-1"]
    prefill = load(PrefillSettings, _named(plan.workers[0]), {})
    assert (prefill.cpus, prefill.threads, prefill.chunk_tokens) == ((0,), 1, 64)
    assert (prefill.kv_checksum, prefill.context_length) == ("pages", 4096)
    for part, cpus in zip(plan.workers[1:], [(1,), (2,)], strict=True):
        decode = load(DecodeSettings, _named(part), {})
        assert (decode.cpus, decode.bootstrap, decode.max_running) == (cpus, ("127.0.0.1:8123",), 4)
        assert (decode.dtype, decode.kv_cache_memory) == ("float32", 2**28)
        assert (decode.kv_checksum, decode.context_length) == ("pages", 4096)
    assert plan.url == "http://127.0.0.1:9000"


def test_workers_of_several_ranks_are_launchers_with_cores_for_all_of_them() -> None:
    flags = {"prefill_tp": "2", "prefill_pp": "2", "decode_tp": "2", "decode": "2", "group_timeout_ms": "9s"}
    plan = make_plan(load_serve(flags, {}, KNOWN), flags, {}, range(8), [BootstrapPorts(8123)])
    prefill = load(PrefillSettings, _named(plan.workers[0]), {})
    assert (prefill.tp, prefill.pp, prefill.rank, prefill.launches) == (2, 2, None, True)
    assert (prefill.cpus, prefill.threads, prefill.group_timeout_ms) == ((0, 1, 2, 3), 0, 9_000)
    for part, cpus in zip(plan.workers[1:], [(4, 5), (6, 7)], strict=True):
        decode = load(DecodeSettings, _named(part), {})
        assert (decode.tp, decode.launches, decode.cpus) == (2, True, cpus)


def test_a_worker_of_both_sides_has_a_core_two_ports_and_the_settings_of_either_side() -> None:
    flags = {"both": "2", "chunk_tokens": "64", "max_running": "4", "metrics_port": "9100"}
    plan = make_plan(load_serve(flags, {}, KNOWN), flags, {}, [0, 1], [BootstrapPorts(8123)], ("0", "1"))
    assert [part.registers_as for part in plan.workers] == [
        ("worker-0-prefill", "worker-0-decode"),
        ("worker-1-prefill", "worker-1-decode"),
    ]
    for place, part in enumerate(plan.workers):
        settings = load(BothSettings, _named(part), {})
        assert (settings.cpus, settings.chunk_tokens, settings.max_running) == ((place,), 64, 4)
        assert settings.of_decode.metrics_port == 9100 + 2 * place
        assert settings.of_prefill.metrics_port == 9101 + 2 * place
        assert settings.of_prefill.chunk_tokens == 64
        assert settings.of_prefill.kv_cache_memory == settings.of_decode.kv_cache_memory == 2**29
        assert part.environ[VISIBLE] == str(place)
        assert part.computes
    assert plan.bootstrap.registers_as == ()


@pytest.mark.parametrize("what", ["grpc_port", "metrics_port"])
async def test_a_busy_port_of_a_worker_of_both_sides_names_the_flag_of_its_side(what: str) -> None:
    with bind_port("127.0.0.1", 0, "--x") as taken:
        port, flag = port_of(taken), what.replace("_", "-")
        for named in (what, f"prefill_{what}"):
            given = {"bootstrap": "127.0.0.1:1", "host": "127.0.0.1", named: str(port)}
            settings = load(BothSettings, given, {})
            side = settings.of_decode if named == what else settings.of_prefill
            with pytest.raises(
                StartupError, match=rf"^port {port} .* --{'' if named == what else 'prefill-'}{flag}$"
            ):
                WorkerHost(side, Incarnation(7), draw())


def test_workers_of_both_sides_run_with_workers_of_one_side() -> None:
    flags = {"both": "1", "decode": "2"}
    plan = make_plan(load_serve(flags, {}, KNOWN), flags, {}, range(6), [BootstrapPorts(8123)])
    assert [part.name for part in plan.workers] == ["decode-0", "decode-1", "worker-0"]
    cores = [_named(part)["cpus"] for part in plan.workers]
    assert cores == ["2-3", "4-5", "0-1"]


def test_no_worker_of_both_sides_is_the_default_by_flag_and_variable() -> None:
    for flags, environ in (({"both": "0"}, {}), ({}, {"BATON_BOTH": "0"})):
        settings = load_serve(flags, environ, KNOWN)
        assert (settings.prefill, settings.decode, settings.both) == (1, 1, 0)
    assert load_serve({}, {"BATON_BOTH": "2"}, KNOWN).prefill == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"both": "1", "decode_tp": "2"}, "--decode-tp is of workers that --decode starts"),
        ({"both": "1", "decode": "1", "prefill_pp": "2"}, "--prefill-pp is of workers that --prefill starts"),
        ({"prefill_weight": "70"}, "--prefill-weight is of workers that --both starts"),
    ],
)
def test_a_setting_of_workers_that_are_not_started_is_refused(flags: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        load_serve(flags, {}, KNOWN)


def test_a_variable_for_workers_that_are_not_started_is_refused_by_its_name() -> None:
    with pytest.raises(SettingsError, match="BATON_PREFILL_WEIGHT is of workers that --both starts"):
        load_serve({}, {"BATON_PREFILL_WEIGHT": "70"}, KNOWN)


def test_a_stack_without_a_side_is_refused() -> None:
    with pytest.raises(SettingsError, match="--prefill 0 --decode 1: give one of each at least, or --both"):
        load_serve({"prefill": "0"}, {}, KNOWN)


def _visible(gpus: tuple[str, ...], **flags: str | None) -> list[str | None]:
    """Return the GPUs that each worker sees."""
    plan = make_plan(load_serve(flags, {}, KNOWN), flags, {}, range(8), [BootstrapPorts(8123)], gpus)
    assert VISIBLE not in plan.bootstrap.environ
    return [part.environ.get(VISIBLE) for part in plan.workers]


def test_each_worker_has_gpus_of_its_own_as_many_as_its_ranks() -> None:
    four = ("0", "1", "2", "3")
    assert _visible(four) == ["0", "1"]
    assert _visible(four, device="cuda", prefill_tp="2", decode="2") == ["0,1", "2", "3"]
    assert _visible(("5", "GPU-8f"), prefill="2", decode="2") == ["5", "GPU-8f", "5", "GPU-8f"]


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_no_gpus_are_dealt_to_workers_that_compute_elsewhere_or_on_one_that_was_named(device: str) -> None:
    assert _visible(("0", "1"), device=device) == [None, None]


def test_without_gpus_no_part_gets_their_variable() -> None:
    assert _visible((), device="cuda") == [None, None]


@pytest.mark.parametrize(
    "variable", ["BATON_TP", "BATON_PP", "BATON_RANK", "BATON_WORLD", "BATON_RENDEZVOUS"]
)
def test_a_shape_without_a_role_is_refused(variable: str) -> None:
    with pytest.raises(SettingsError, match=f"{variable} is not taken by baton serve"):
        load_serve({}, {variable: "2"}, KNOWN)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7"])
def test_serving_other_addresses_keeps_workers_and_their_registry_on_the_loopback(host: str) -> None:
    flags = {"host": host}
    plan = make_plan(load_serve(flags, {}, KNOWN), flags, {}, [0, 1], [BootstrapPorts(8100)])
    bootstrap = load(BootstrapSettings, _named(plan.bootstrap), {})
    assert (bootstrap.host, bootstrap.grpc_host) == (host, "127.0.0.1")
    assert plan.bootstrap_addresses == ("127.0.0.1:8100",)
    decode = load(DecodeSettings, _named(plan.workers[1]), {})
    assert (decode.host, decode.bootstrap) == ("127.0.0.1", ("127.0.0.1:8100",))
    assert plan.url == ("http://127.0.0.1:8000" if host == "0.0.0.0" else f"http://{host}:8000")


@pytest.mark.parametrize("flags", [{}, {"prefill_tp": "2"}], ids=["processes", "rank groups"])
def test_workers_have_the_metrics_ports_from_the_one_that_was_given_on(flags: dict[str, str | None]) -> None:
    flags |= {"prefill": "2", "decode": "2", "metrics_port": "9100"}
    plan = make_plan(load_serve(flags, {}, KNOWN), flags, {}, range(8), [BootstrapPorts(8100)])
    ports = [_named(part)["metrics_port"] for part in plan.workers]
    assert ports == ["9100", "9101", "9102", "9103"]
    with pytest.raises(SettingsError, match=r"--metrics-port 65533: the last worker would have 65536"):
        load_serve({**flags, "metrics_port": "65533"}, {}, KNOWN)


def test_without_a_metrics_port_each_worker_takes_any_free_one() -> None:
    plan = make_plan(load_serve({}, {}, KNOWN), {}, {}, [0, 1], [BootstrapPorts(8100)])
    assert not any("metrics_port" in _named(part) for part in plan.workers)


def test_a_bad_value_for_a_part_fails_in_the_callers_terms() -> None:
    flags = {"kv_cache_memory": "lots"}
    with pytest.raises(SettingsError, match=r"^--kv-cache-memory: .lots. is not allowed"):
        make_plan(load_serve(flags, {}, KNOWN), flags, {}, [0], [BootstrapPorts(8100)])


def test_a_variable_without_effect_is_refused() -> None:
    with pytest.raises(SettingsError, match="BATON_HTTP_PORT is not taken by baton serve"):
        load_serve({}, {"BATON_HTTP_PORT": "9000"}, KNOWN)


def test_every_service_setting_is_either_taken_or_listed_as_not() -> None:
    taken = {each.name for group in passed_on().values() for each in group}
    for cls in (BootstrapSettings, PrefillSettings, DecodeSettings):
        for each in settings_of(cls):
            assert each.name in taken | NOT_TAKEN | {"host", "grpc_port", "metrics_port", "log_level"}


def test_printed_commands_run_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, others = tmp_path / "our s" / "baton", tmp_path / "other" / "baton"
    for script in (ours, others):
        script.parent.mkdir()
        script.write_text("#!/bin/sh\n")
        script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(others.parent))
    assert command_words("our s/baton") == f"'{ours}'", "what is on the path is another installation's"
    monkeypatch.setenv("PATH", str(ours.parent))
    assert command_words("our s/baton") == "baton"
    assert command_words("/x/services/cli/main.py") == f"{sys.executable} -m baton.cli.main"


def test_the_ready_lines_name_another_url_and_quote_for_the_shell() -> None:
    text = "\n".join(ready_lines("http://127.0.0.1:9000", "it's"))
    assert "curl http://127.0.0.1:9000/v1/chat/completions" in text
    assert "chat --url http://127.0.0.1:9000" in text
    assert """it'"'"'s""" in text
    assert "http://127.0.0.1:9000/ui or " in text
    assert "etrics" not in text
    metrics = ["prefill-0 http://127.0.0.1:9100/metrics", "decode-0 http://127.0.0.1:9101/metrics"]
    lines = ready_lines("http://127.0.0.1:9000", "m", metrics=metrics)
    assert f"Metrics of the workers: {metrics[0]}, {metrics[1]}" in lines
    assert "/ui" not in "\n".join(ready_lines("http://127.0.0.1:9000", "m", has_admin_port=True))
    admins = "\n".join(ready_lines("http://127.0.0.1:9000", "m", operators=Operators.ADMINS))
    assert "export BATON_ADMIN_API_KEYS=" in admins
    nobody = "\n".join(ready_lines("http://127.0.0.1:9000", "m", operators=Operators.NOBODY))
    assert "9000/ui" not in nobody
    assert "--admin-api-key-file, --admin-port or --open-admin" in nobody
    told = ready_lines("http://127.0.0.1:9000", "m", sampling={"temperature": 0.6, "top_k": 20})
    assert told[1] == "Where a request does not say it, as the model recommends: temperature 0.6, top_k 20"


def test_a_bootstrap_that_is_restarted_has_the_same_key_of_event_ids() -> None:
    environ = {"BATON_RUN_TOKEN": "a-token-of-the-run"}
    plans = [
        make_plan(load_serve({}, environ, KNOWN), {}, environ, [0, 1], [BootstrapPorts(8123)])
        for _ in range(2)
    ]
    keys = [plan.bootstrap.environ["BATON_REASONING_KEY"] for plan in plans]
    assert len(set(keys)) == 2, "each stack draws its own"
    assert all(len(key) >= 32 for key in keys)
    assert all("BATON_REASONING_KEY" not in worker.environ for worker in plans[0].workers)
    environ["BATON_REASONING_KEY"] = "a-key-of-several-stacks"
    plan = make_plan(load_serve({}, environ, KNOWN), {}, environ, [0, 1], [BootstrapPorts(8123)])
    assert plan.bootstrap.environ["BATON_REASONING_KEY"] == "a-key-of-several-stacks"


def test_several_bootstraps_share_the_http_port_and_nothing_else() -> None:
    flags = {"bootstraps": "2", "port": "9000"}
    ports = [BootstrapPorts(8123, 7001), BootstrapPorts(8124, 7002)]
    environ = {"BATON_API_KEYS": "one-key-0123456789"}
    plan = make_plan(load_serve(flags, environ, KNOWN), flags, environ, [0, 1], ports)
    assert [part.name for part in plan.bootstraps] == ["bootstrap-0", "bootstrap-1"]
    for part, own in zip(plan.bootstraps, ports, strict=True):
        bootstrap = load(BootstrapSettings, _named(part), {})
        assert (bootstrap.http_port, bootstrap.reuse_port) == (9000, True)
        assert (bootstrap.grpc_port, bootstrap.admin_port) == own
        assert bootstrap.peer_bootstraps == plan.bootstrap_addresses == ("127.0.0.1:8123", "127.0.0.1:8124")
        assert part.environ["BATON_API_KEYS"] == "one-key-0123456789"
    assert len({part.environ["BATON_REASONING_KEY"] for part in plan.bootstraps}) == 1
    assert len({part.environ["BATON_RUN_TOKEN"] for part in (*plan.bootstraps, *plan.workers)}) == 1
    for part in plan.workers:
        assert part.flag("--bootstrap") == "127.0.0.1:8123,127.0.0.1:8124"
    assert plan.url == "http://127.0.0.1:9000"
    assert plan.admin_urls == ["http://127.0.0.1:7001", "http://127.0.0.1:7002"]


def test_a_lone_bootstrap_shares_no_port() -> None:
    plan = make_plan(load_serve({}, {}, KNOWN), {}, {}, [0, 1], [BootstrapPorts(8123)])
    assert [part.name for part in plan.bootstraps] == ["bootstrap"]
    assert plan.bootstrap.flag("--reuse-port") is None
    assert plan.bootstrap.flag("--admin-port") is None
    assert plan.bootstrap.flag("--peer-bootstraps") is None
    assert plan.admin_urls == []


def test_ports_of_several_bootstraps_end_at_the_last_port() -> None:
    with pytest.raises(SettingsError, match="2 bootstraps have one each"):
        load_serve({"bootstraps": "2", "grpc_port": "65535"}, {}, KNOWN)
