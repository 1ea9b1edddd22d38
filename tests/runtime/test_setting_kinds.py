"""Tests that each kind of setting reads what it allows, and nothing else."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.runtime.setting_kinds import (
    ADDRESS,
    CPUS,
    DURATION_MS,
    PORT,
    POSITIVE,
    SIZE,
    SWITCH,
    TEXT,
    SettingKind,
    choices,
    split_address,
)

READS: list[tuple[SettingKind[Any], str, object]] = [
    (SIZE, "512MiB", 512 * 2**20),
    (SIZE, "2GiB", 2 * 2**30),
    (SIZE, "3Ki", 3 * 2**10),
    (SIZE, "512Mi", 512 * 2**20),
    (SIZE, "2Gi", 2 * 2**30),
    (SIZE, "1Ti", 2**40),
    (SIZE, "1GB", 10**9),
    (SIZE, "1.5 kib", 1536),
    (SIZE, "4096", 4096),
    (DURATION_MS, "3s", 3_000),
    (DURATION_MS, "500ms", 500),
    (DURATION_MS, "1.5s", 1_500),
    (DURATION_MS, "2m", 120_000),
    (DURATION_MS, "250", 250),
    (ADDRESS, "127.0.0.1:8100", "127.0.0.1:8100"),
    (ADDRESS, "[::1]:8100", "[::1]:8100"),
    (ADDRESS, "prefill.example:1", "prefill.example:1"),
    (PORT, "0", 0),
    (PORT, "65535", 65535),
    (POSITIVE, "1", 1),
    (SWITCH, "on", True),
    (SWITCH, "False", False),
    (CPUS, "0,2-3", (0, 2, 3)),
    (CPUS, "3,1,1-2", (1, 2, 3)),
    (CPUS, "", ()),
    (choices("text", "json"), "json", "json"),
    (TEXT, "", ""),
]

REFUSES: list[tuple[SettingKind[Any], str]] = [
    (SIZE, ""), (SIZE, "0"), (SIZE, "-1GB"), (SIZE, "1 apple"), (SIZE, "GiB"), (SIZE, "1iB"), (SIZE, "1e9"),
    (SIZE, "99999999TB"),
    (DURATION_MS, "0s"), (DURATION_MS, "3 weeks"), (DURATION_MS, "-3s"), (DURATION_MS, "0.4ms"),
    (ADDRESS, "8100"), (ADDRESS, ":8100"), (ADDRESS, "host:"), (ADDRESS, "host:0"), (ADDRESS, "host:65536"),
    (ADDRESS, "::1:8100"), (ADDRESS, "http://host:80"), (ADDRESS, "a b:80"),
    (PORT, "65536"), (PORT, "-1"), (PORT, "http"), (PORT, "٣"),
    (POSITIVE, "0"), (POSITIVE, "1.0"), (POSITIVE, "1" * 13),
    (SWITCH, "maybe"), (SWITCH, ""),
    (CPUS, "3-1"), (CPUS, "0,,1"), (CPUS, "a"), (CPUS, "0-"), (CPUS, "0-99999"),
    (choices("text", "json"), "xml"), (choices("text", "json"), ""),
    (TEXT, "two\nlines"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "value"), READS)
def test_allowed_text_is_read(kind: SettingKind[Any], text: str, value: object) -> None:
    assert kind.parse(text) == value


@pytest.mark.parametrize(("kind", "text"), REFUSES)
def test_other_text_is_refused(kind: SettingKind[Any], text: str) -> None:
    with pytest.raises(ValueError):
        kind.parse(text)


@pytest.mark.parametrize(("kind", "text", "value"), READS)
def test_what_is_shown_reads_back(kind: SettingKind[Any], text: str, value: object) -> None:
    assert kind.parse(kind.show(value)) == value


@given(st.integers(1, 2**50))
def test_every_size_and_duration_survives_showing(value: int) -> None:
    assert SIZE.parse(SIZE.show(value)) == value
    assert DURATION_MS.parse(DURATION_MS.show(value)) == value


@given(st.sets(st.integers(0, 200), max_size=30).map(lambda cpus: tuple(sorted(cpus))))
def test_every_set_of_cores_survives_showing(cpus: tuple[int, ...]) -> None:
    assert CPUS.parse(CPUS.show(cpus)) == cpus


def test_a_v6_address_splits_without_its_brackets() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
