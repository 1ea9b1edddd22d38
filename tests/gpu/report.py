"""Report of the findings: one table for readers, two files for `docs/benchmarks`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tests.gpu.findings import Finding, FindingVerdict
from tests.gpu.machine import MACHINE

WIDE: Final = 300
"""Characters of a detail in the table; the JSON file has all of it."""


@dataclass(frozen=True)
class Report:
    name: str
    device: str
    machine: dict[str, Any]
    seconds: float
    findings: Sequence[Finding]

    def count(self, verdict: FindingVerdict) -> int:
        return sum(each.verdict is verdict for each in self.findings)

    @property
    def wrong(self) -> bool:
        return self.count(FindingVerdict.WRONG) > 0

    @property
    def summary(self) -> str:
        counts = [
            f"{self.count(verdict)} {verdict.value}" for verdict in FindingVerdict if self.count(verdict)
        ]
        return f"{', '.join(counts)} in {self.seconds:.0f} s on {self.machine.get('device', self.device)}"

    def table(self) -> str:
        """Lines for a terminal."""
        rows = [_row(each) for each in self.findings]
        widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else [0, 0, 0]
        lines = [
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", self.summary])

    def write(self, folder: Path) -> list[Path]:
        """`gpu-NAME.json` and `gpu-NAME.md`. Returns the files."""
        folder.mkdir(parents=True, exist_ok=True)
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        told = {
            "benchmark": "gpu",
            "name": self.name,
            "date": date,
            "device": self.device,
            "seconds": round(self.seconds, 1),
            "machine": self.machine,
            "findings": [asdict(each) for each in self.findings],
        }
        texts = {"json": json.dumps(told, indent=1) + "\n", "md": self._markdown(date)}
        paths = []
        for suffix, text in texts.items():
            paths.append(folder / f"gpu-{self.name}.{suffix}")
            paths[-1].write_text(text, "utf-8")
        return paths

    def _markdown(self, date: str) -> str:
        rows = [["part", "what", "", "seconds", "seen"], ["---"] * 5]
        rows += [
            [
                each.part,
                each.what,
                f"**{each.verdict.value}**" if each.verdict is FindingVerdict.WRONG else each.verdict.value,
                f"{each.seconds:g}",
                _short(each.detail).replace("|", "\\|"),
            ]
            for each in self.findings
            if each.what != MACHINE
        ]
        packages = self.machine.get("packages", {})
        facts = {
            "GPU": f"{self.machine.get('device')}, {self.machine.get('memory_gib', '?')} GiB",
            "compute capability": self.machine.get("capability"),
            "driver, memory in use": self.machine.get("driver"),
            "torch's CUDA": self.machine.get("torch_cuda"),
            "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
            "Python": self.machine.get("python"),
            "cores": self.machine.get("cores"),
        }
        return "\n".join(
            [
                f"# The kit on {self.machine.get('device', self.device)}",
                "",
                f"Measured {date} by `python -m tests.gpu --device {self.device}`: {self.summary}.",
                "",
                *(f"* {name}: {value}" for name, value in facts.items() if value not in (None, "")),
                "",
                *(f"| {' | '.join(row)} |" for row in rows),
                "",
            ]
        )


def _row(found: Finding) -> tuple[str, str, str, str]:
    return found.part, found.verdict.value, found.what, _short(found.detail)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= WIDE else line[: WIDE - 1] + "…"
