"""Tests that the commands, settings and metrics in docs/deploy.md exist."""

import re
import shlex
from pathlib import Path

import yaml
from cryptography import x509

from baton.cli.certs import make_certs
from baton.cli.metric_catalog import exported
from baton.runtime.settings import settings_of
from baton.wire.service_role import ServiceRole
from tests.deploy.chart import CHART, NAMESPACE, ROOT, helm, of_kind
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


def test_the_certificates_that_are_shown_are_for_all_names_of_the_bootstraps(tmp_path: Path) -> None:
    """Each bootstrap has the same ones. Workers check the party's name, so no address is in them."""
    [made] = [shlex.split(line) for line in commands() if line.startswith("baton certs ")]
    given = [value for flag, value in zip(made[3::2], made[4::2], strict=True) if flag == "--name"]
    make_certs(tmp_path / "certs", given)
    names = {name: dns_names(tmp_path / "certs" / f"{name}.crt") for name in ("http", "bootstrap")}
    services = [each["metadata"]["name"] for each in of_kind("replicas", "Service")]
    wanted = [f"{name}.{NAMESPACE}.svc" for name in services if not name.endswith("-admin")]
    assert wanted == ["baton.baton.svc", "baton-bootstrap-grpc.baton.svc"]
    assert names["http"] == ["baton.example.org", *wanted]
    assert names["bootstrap"] == [ServiceRole.BOOTSTRAP.tls_name]


def dns_names(certificate: Path) -> list[str]:
    read = x509.load_pem_x509_certificate(certificate.read_bytes())
    return read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
        x509.DNSName
    )


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
