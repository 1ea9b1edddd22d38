"""Part of the kit that runs the tests marked `gpu`."""

from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from tests.gpu.findings import CannotRun, Finding
from tests.gpu.kit import Kit, last_line

FILES: Final = (
    "tests/bench/test_step.py",
    "tests/engine/test_bound_thread.py",
    "tests/engine/test_cuda.py",
    "tests/engine/test_kv_cache.py",
)
"""Test files that have tests marked `gpu`."""


def run(kit: Kit) -> None:
    kit.findings.note("tests marked gpu", lambda found: _run(kit, found), 30)


def _run(kit: Kit, found: Finding) -> None:
    if not kit.on_gpu:
        raise CannotRun("they are of a GPU alone")
    told = kit.folder / "checks.xml"
    words = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--junitxml", str(told))
    ran = kit.command(*words, *FILES, most_s=kit.findings.left_s)
    Path(kit.folder / "checks.log").write_text(ran.stdout + ran.stderr)
    assert told.exists(), last_line(ran.stdout + ran.stderr)
    cases = list(ElementTree.parse(told).iter("testcase"))
    wrong = [each for each in cases if each.find("failure") is not None or each.find("error") is not None]
    skipped = [each for each in cases if each.find("skipped") is not None]
    found.detail = f"{len(cases) - len(wrong) - len(skipped)} of {len(cases)} passed, {len(skipped)} skipped"
    assert cases, f"no test was run: {last_line(ran.stdout)}"
    assert not wrong, f"{found.detail}; {'; '.join(map(_why, wrong[:5]))}"


def _why(case: ElementTree.Element) -> str:
    fault = case.find("failure")
    fault = case.find("error") if fault is None else fault
    told = "" if fault is None else (fault.get("message") or "").splitlines()[0:1]
    return f"{case.get('name')}: {' '.join(told)}"
