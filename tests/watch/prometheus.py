"""A real Prometheus that scrapes a stack of the tests, and queries to it."""

import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from tests.http import web
from tests.idle import POLL_S
from tests.ports import free_port
from tests.suite.marks import starts

RULES: Final = Path(__file__).parents[2] / "deploy" / "prometheus"
PATIENCE_S: Final = 60.0
NAMESPACE: Final = "watched"


def program(name: str) -> str:
    """Return the path of a Prometheus program for a test that may use it. Fails with the name of the package
    to install if it is absent."""
    starts("prometheus")
    found = shutil.which(name)
    assert found is not None, (
        f"{name} is not on the PATH: `make programs`, or install Debian's package prometheus"
    )
    return found


def promtool(*given: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program("promtool"), *given], input=text, capture_output=True, text=True, timeout=120, check=False
    )


@dataclass(frozen=True)
class Prometheus:
    url: str
    started_s: float

    def ask(self, path: str, **given: Any) -> Any:
        reply = web().get(f"{self.url}/api/v1/{path}", params=given, timeout=30)
        body = reply.json()
        assert body["status"] == "success", (path, given, body)
        return body["data"]

    def query(self, expression: str) -> list[Any]:
        result: list[Any] = self.ask("query", query=expression)["result"]
        return result

    def values(self, expression: str) -> list[float]:
        """Return every numeric value of every series since the start."""
        found = self.ask("query_range", query=expression, start=self.started_s, end=time.time(), step=1)
        values = [float(value) for series in found["result"] for _, value in series["values"]]
        return [value for value in values if not math.isnan(value)]

    def firing(self, name: str) -> list[dict[str, str]]:
        """Return the labels of each firing alert of this name."""
        alerts = self.ask("alerts")["alerts"]
        return [
            each["labels"]
            for each in alerts
            if each["labels"]["alertname"] == name and each["state"] == "firing"
        ]

    def until(self, holds: Callable[[], object], what: str, more: object = "") -> None:
        """`more`: what changes meanwhile, to be told of a failure."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"never: {what} {more}"
            time.sleep(POLL_S * 4)


def hastened(rules: str) -> str:
    """Return the same rules, which fire after a second instead of minutes."""
    return re.sub(r"^(\s+for: )\d+m$", r"\g<1>1s", rules, flags=re.MULTILINE)


@contextmanager
def watching(targets: Mapping[str, str], folder: Path) -> Iterator[Prometheus]:
    """Scrapes `targets` (base URLs) each second and knows the rules of `deploy/prometheus`."""
    files: Sequence[str] = ("rules.yml", "alerts.yml")
    for name in files:
        (folder / name).write_text(hastened((RULES / name).read_text()))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": list(files),
        "scrape_configs": [
            {
                "job_name": "baton",
                "static_configs": [
                    {
                        "targets": [url.removeprefix("http://") for url in targets.values()],
                        "labels": {"namespace": NAMESPACE},
                    }
                ],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    url, log = f"http://127.0.0.1:{free_port()}", folder / "prometheus.log"
    command = [program("prometheus"), f"--config.file={folder / 'prometheus.yml'}"]
    command += [
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={url.removeprefix('http://')}",
    ]
    started_s = time.time()
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    try:
        watch = Prometheus(url, started_s)
        watch.until(lambda: _answers(f"{url}/-/ready", process, log), "Prometheus is ready")
        yield watch
    finally:
        process.terminate()
        process.wait(30)


def _answers(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return web().get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False
