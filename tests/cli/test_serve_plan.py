"""`baton serve` gives each part the command line that a pod would run."""

import pytest

from services.bootstrap.settings import BootstrapSettings
from services.cli.main import KNOWN
from services.cli.serve import ready_lines
from services.cli.serve_settings import NOT_TAKEN, Part, load_serve, make_plan, passed_on
from services.decode.settings import DecodeSettings
from services.prefill.settings import PrefillSettings
from services.runtime.errors import SettingsError
from services.runtime.settings import load, settings_of


def _named(part: Part) -> dict[str, str | None]:
    flags = zip(part.flags[::2], part.flags[1::2], strict=True)
    return {flag.removeprefix("--").replace("-", "_"): text for flag, text in flags}


def test_each_part_gets_what_was_asked_for_and_its_own_place() -> None:
    flags = {
        "prefill": "1",
        "decode": "2",
        "port": "9000",
        "dtype": "float32",
        "chunk_tokens": "64",
        "max_running": "4",
        "kv_checksum": "pages",
    }
    environ = {"BATON_KV_CACHE_MEMORY": "256MiB", "BATON_MAX_QUEUE": "7"}
    plan = make_plan(load_serve(flags, environ, KNOWN), flags, environ, [0, 1, 2], 8123)

    bootstrap = load(BootstrapSettings, _named(plan.bootstrap), {})
    assert (bootstrap.http_port, bootstrap.grpc_port, bootstrap.max_queue) == (9000, 8123, 7)
    assert [part.name for part in plan.workers] == ["prefill-0", "decode-0", "decode-1"]
    prefill = load(PrefillSettings, _named(plan.workers[0]), {})
    assert (prefill.cpus, prefill.threads, prefill.chunk_tokens) == ((0,), 1, 64)
    assert prefill.kv_checksum == "pages"
    for part, cpus in zip(plan.workers[1:], [(1,), (2,)], strict=True):
        decode = load(DecodeSettings, _named(part), {})
        assert (decode.cpus, decode.bootstrap, decode.max_running) == (cpus, "127.0.0.1:8123", 4)
        assert (decode.dtype, decode.kv_cache_memory) == ("float32", 2**28)
        assert decode.kv_checksum == "pages"
    assert plan.url == "http://127.0.0.1:9000"


def test_workers_of_several_ranks_are_launchers_with_cores_for_all_of_them() -> None:
    flags = {"prefill_tp": "2", "prefill_pp": "2", "decode_tp": "2", "decode": "2", "group_timeout_ms": "9s"}
    plan = make_plan(load_serve(flags, {}, KNOWN), flags, {}, range(8), 8123)
    prefill = load(PrefillSettings, _named(plan.workers[0]), {})
    assert (prefill.tp, prefill.pp, prefill.rank, prefill.launches) == (2, 2, None, True)
    assert (prefill.cpus, prefill.threads, prefill.group_timeout_ms) == ((0, 1, 2, 3), 0, 9_000)
    for part, cpus in zip(plan.workers[1:], [(4, 5), (6, 7)], strict=True):
        decode = load(DecodeSettings, _named(part), {})
        assert (decode.tp, decode.launches, decode.cpus) == (2, True, cpus)


@pytest.mark.parametrize(
    "variable", ["BATON_TP", "BATON_PP", "BATON_RANK", "BATON_WORLD", "BATON_RENDEZVOUS"]
)
def test_a_shape_that_is_not_said_of_a_role_is_refused(variable: str) -> None:
    with pytest.raises(SettingsError, match=f"{variable} is not taken by baton serve"):
        load_serve({}, {variable: "2"}, KNOWN)


def test_serving_all_addresses_keeps_workers_on_the_loopback() -> None:
    flags = {"host": "0.0.0.0"}
    plan = make_plan(load_serve(flags, {}, KNOWN), flags, {}, [0, 1], 8100)
    assert load(BootstrapSettings, _named(plan.bootstrap), {}).host == "0.0.0.0"
    assert {load(DecodeSettings, _named(plan.workers[1]), {}).host} == {"127.0.0.1"}
    assert plan.url == "http://127.0.0.1:8000"


def test_a_bad_value_for_a_part_fails_in_the_callers_terms() -> None:
    flags = {"kv_cache_memory": "lots"}
    with pytest.raises(SettingsError, match=r"^--kv-cache-memory: .lots. is not allowed"):
        make_plan(load_serve(flags, {}, KNOWN), flags, {}, [0], 8100)


def test_a_variable_without_effect_is_refused() -> None:
    with pytest.raises(SettingsError, match="BATON_HTTP_PORT is not taken by baton serve"):
        load_serve({}, {"BATON_HTTP_PORT": "9000"}, KNOWN)


def test_every_service_setting_is_either_taken_or_listed_as_not() -> None:
    taken = {each.name for group in passed_on().values() for each in group}
    for cls in (BootstrapSettings, PrefillSettings, DecodeSettings):
        for each in settings_of(cls):
            assert each.name in taken | NOT_TAKEN | {"host", "grpc_port", "log_level"}


def test_the_ready_lines_name_another_url_and_quote_for_the_shell() -> None:
    text = "\n".join(ready_lines("http://127.0.0.1:9000", "it's"))
    assert "curl http://127.0.0.1:9000/v1/chat/completions" in text
    assert "chat --url http://127.0.0.1:9000" in text
    assert """it'"'"'s""" in text
    assert "http://127.0.0.1:9000/ui or " in text
    assert "/ui" not in "\n".join(ready_lines("http://127.0.0.1:9000", "m", apart=True))
