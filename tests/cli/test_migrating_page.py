"""Tests that the flags and metrics in docs/migrating.md exist."""

import re
from pathlib import Path
from typing import Final

import yaml

from baton.bootstrap.settings import BootstrapSettings
from baton.cli.metric_catalog import exported
from baton.cli.peers_flags import INSTEAD
from baton.decode.settings import DecodeSettings
from baton.prefill.settings import PrefillSettings
from baton.runtime.settings import settings_of

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")


def _section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_every_flag_of_ours_is_a_setting() -> None:
    ours = {row.split("|")[3] for row in _section("Flags").splitlines() if row.startswith("|")}
    named = set(re.findall(r"--[\w-]+", " ".join(ours))) - {"---"}
    known = {
        each.flag
        for settings in (BootstrapSettings, PrefillSettings, DecodeSettings)
        for each in settings_of(settings)
    }
    assert len(named) > 20
    assert named <= known


def test_every_flag_of_a_peer_that_is_not_ours_too_is_answered_with_ours() -> None:
    rows = [row.split("|")[1:4] for row in _section("Flags").splitlines() if row.startswith("|")]
    theirs = set(re.findall(r"--[a-z][\w-]+", " ".join(cell for row in rows for cell in row[:2])))
    ours = {
        each.flag
        for settings in (BootstrapSettings, PrefillSettings, DecodeSettings)
        for each in settings_of(settings)
    }
    assert theirs - ours == set(INSTEAD)
    named = set(re.findall(r"--[a-z][\w-]+", " ".join(INSTEAD.values())))
    assert named <= ours | {"--prefill-tp", "--decode-tp", "--prefill-pp"}


def test_every_metric_of_ours_is_exported() -> None:
    assert set(re.findall(r"\bbaton_\w+", PAGE)) <= {each.name for each in exported()}


def test_the_names_of_vllm_that_are_recorded_are_all_told() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text(encoding="utf-8"))
    recorded = {
        re.sub("_(bucket|sum|count)$", "", rule["record"].removeprefix("vllm:"))
        for group in rules["groups"]
        if group["name"] == "baton-as-vllm"
        for rule in group["rules"]
    }
    told = _section("Metrics").partition("| `vllm:`")[0].partition("without `model_name`")[2]
    assert set(re.findall(r"`(\w+)`", told)) == recorded
