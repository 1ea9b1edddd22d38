"""Tests that the commands, settings and metrics in docs/deploy.md exist."""

import re
import shlex
from pathlib import Path

import yaml

from baton.cli.metric_catalog import exported
from baton.runtime.settings import settings_of
from tests.deploy.chart import CHART, ROOT, helm
from tests.deploy.flags import CLASSES

GUIDE = (ROOT / "docs" / "deploy.md").read_text()
SUFFIXES = ("", "_bucket", "_sum", "_count")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Return the page's commands, with continued lines joined."""
    joined = "\n".join(blocks("console")).replace("\\\n", " ")
    return [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]


def test_every_metric_that_is_named_is_exported() -> None:
    known = {each.name + suffix for each in exported() for suffix in SUFFIXES}
    named = set(re.findall(r"\bbaton_\w+", GUIDE))
    assert len(named) > 8
    assert named <= known


def test_every_setting_that_is_named_in_the_values_is_one() -> None:
    known = {each.flag.removeprefix("--") for cls in CLASSES.values() for each in settings_of(cls)}
    for word in ("kv-cache-memory", "max-running", "chunk-tokens", "tp", "pp"):
        assert f"`{word}" in GUIDE
        assert word in known


def test_the_values_that_are_shown_render(tmp_path: Path) -> None:
    shown = [block for block in blocks("yaml") if block.startswith("# values:")]
    assert shown
    for block in shown:
        file = tmp_path / "values.yaml"
        file.write_text(block)
        assert list(yaml.safe_load_all(helm("template", "baton", str(CHART), "--values", str(file)).stdout))


def test_the_admin_port_is_asked_in_the_way_in_which_the_values_that_are_shown_serve_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(next(block for block in blocks("yaml") if block.startswith("# values:")))
    rendered = yaml.safe_load_all(helm("template", "baton", str(CHART), "--values", str(file)).stdout)
    schemes = {
        container["readinessProbe"]["httpGet"]["scheme"].lower()
        for each in rendered
        if each and each["kind"] == "Deployment" and "bootstrap" in each["metadata"]["name"]
        for container in each["spec"]["template"]["spec"]["containers"]
    }
    asked = re.findall(r"(https?)://[\w.]+:8001", GUIDE)
    assert len(asked) > 2
    assert set(asked) == schemes


def test_the_install_commands_that_are_shown_render(tmp_path: Path) -> None:
    installs = [shlex.split(line) for line in commands() if line.startswith("helm install")]
    assert len(installs) == 2
    (tmp_path / "values.yaml").write_text(
        next(block for block in blocks("yaml") if block.startswith("# values:"))
    )
    for words in installs:
        assert words[3] == "deploy/helm/baton"
        rest = [str(tmp_path / each) if each == "values.yaml" else each for each in words[4:]]
        rest = [each for each in rest if each != "--create-namespace"]
        helm("template", words[2], str(CHART), *rest)
