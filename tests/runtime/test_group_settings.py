"""Tests of the flags of a worker of several ranks."""

import pytest

from baton.decode.settings import DecodeSettings
from baton.prefill.settings import PrefillSettings
from baton.runtime.errors import SettingsError
from baton.runtime.settings import load, to_flags
from baton.topology import Topology

REFUSED: list[tuple[dict[str, str], str]] = [
    ({"rank": "0", "tp": "2"}, r"^--rank 0 of 2 needs --rendezvous"),
    ({"tp": "2", "rendezvous": "a:1"}, r"^--rendezvous is for one rank of a worker: give its --rank too"),
    ({"rank": "2", "tp": "2", "rendezvous": "a:1"}, r"^--rank 2: --tp 2 --pp 1 makes 2, and the first is 0"),
    ({"rank": "1"}, r"^--rank 1: --tp 1 --pp 1 makes 1"),
    ({"tp": "2", "pp": "2", "world": "2"}, r"^--world 2 is not what --tp 2 --pp 2 makes: 4"),
    ({"tp": "2", "device": "cuda:1"}, r"^--device cuda:1 is one device for 2 ranks: give cuda or auto"),
    ({"tp": "2", "group_timeout_ms": "1s"}, r"^--group-timeout-ms 1000: give 2000 at least"),
    ({"tp": "3", "machines": "2", "machine": "0"}, r"^--machines 2: --tp 3 --pp 1 makes 3, which is no"),
    (
        {"tp": "4", "machines": "2", "machine": "2"},
        r"^--machine 2: there are 2 \(--machines\)",
    ),
    ({"machine": "1"}, r"^--machine 1: there are 1"),
    ({"tp": "4", "machines": "2"}, r"^--machines 2 needs --machine: which of them this is"),
    ({"tp": "4", "machines": "2", "machine": "1"}, r"^--machines 2 needs --rendezvous: where the ranks meet"),
    ({"tp": "4", "machines": "2", "rank": "1"}, r"^--rank 1 is one rank, --machines starts several"),
    ({"tp": "2", "quantize": "int4"}, r"^--quantize int4: the 2 ranks of --tp 2 --pp 1 compute over plain"),
    ({"rank": "-1"}, r"^--rank: '-1' is not allowed: use a whole number from 0 to 1023, or nothing"),
    ({"rendezvous": "here"}, r"^--rendezvous: 'here' is not allowed: use host:port"),
    ({"tp": "0"}, r"^--tp: '0' is not allowed: use a whole number from 1 to 1024"),
]


@pytest.mark.parametrize(("flags", "text"), REFUSED, ids=lambda each: str(each)[:40])
def test_flags_that_do_not_go_together_are_refused_by_name(flags: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        load(PrefillSettings, flags, {})


def test_codes_are_multiplied_by_compiled_steps_alone() -> None:
    """Only decode multiplies quantized codes directly. Prefill computes with the dequantized numbers."""
    flags = {"quantize": "int8", "compiled_steps": "false"}
    assert not load(PrefillSettings, flags, {}).multiplies_codes
    with pytest.raises(SettingsError, match=r"^--quantize int8: .* leave out --compiled-steps false"):
        load(DecodeSettings, flags, {})


def test_a_worker_is_one_process_by_default() -> None:
    alone = load(DecodeSettings, {}, {})
    assert (alone.topology, alone.launches, alone.grouped) == (Topology(), False, False)
    first = load(DecodeSettings, {"rank": "0", "world": "1"}, {})
    assert (first.launches, first.grouped) == (False, False)


def test_without_a_rank_a_process_launches_and_with_one_it_is_that_rank() -> None:
    launcher = load(PrefillSettings, {"tp": "2", "pp": "3", "world": "6"}, {})
    assert (launcher.topology, launcher.launches) == (Topology(tensor=2, pipeline=3), True)
    rank = load(PrefillSettings, {"tp": "2", "pp": "3"}, {"BATON_RANK": "5", "BATON_RENDEZVOUS": "a:1"})
    assert (rank.rank, rank.launches, rank.grouped) == (5, False, True)


def test_what_the_launcher_passes_on_loads_to_the_same_settings() -> None:
    given = {"tp": "2", "rank": "0", "rendezvous": "127.0.0.1:4000", "name": "decode-0"}
    settings = load(DecodeSettings, given, {})
    flags = to_flags(settings)
    named = {flag[2:].replace("-", "_"): text for flag, text in zip(flags[::2], flags[1::2], strict=True)}
    assert load(DecodeSettings, named, {}) == settings


def test_machines_hold_equally_many_ranks_neighbours_together() -> None:
    given = {"tp": "2", "pp": "3", "machines": "3", "rendezvous": "a:1"}
    parts = [load(PrefillSettings, {**given, "machine": str(each)}, {}) for each in range(3)]
    assert all(part.launches and not part.grouped for part in parts)
    assert [rank for part in parts for rank in part.ranks_here] == list(range(6))
    assert [len(part.ranks_here) for part in parts] == [2, 2, 2]
    assert list(load(PrefillSettings, {"tp": "2"}, {}).ranks_here) == [0, 1]
