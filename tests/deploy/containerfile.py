"""Stages of the Containerfile, and their instructions."""

import json
import re
from dataclasses import dataclass, field

from tests.deploy.chart import ROOT

TARGETS = ("bootstrap", "worker", "worker-cuda", "worker-vllm")


@dataclass
class Stage:
    name: str
    base: str
    said: list[tuple[str, str]] = field(default_factory=list)
    """Instructions and what follows them, in order."""

    def all(self, word: str) -> list[str]:
        return [text for instruction, text in self.said if instruction == word]

    def last(self, word: str) -> str:
        return self.all(word)[-1]

    def exec_form(self, word: str) -> list[str]:
        """Raises ValueError for the form that goes through a shell, which keeps signals to itself."""
        command: list[str] = json.loads(self.last(word))
        return command


def read(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """The arguments before the first stage, and the stages by name."""
    stages: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    current: Stage | None = None
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for instruction in re.split(r"(?<!\\)\n", "\n".join(lines)):
        word, _, rest = instruction.replace("\\\n", " ").strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = stages[name] = Stage(name, base)
        elif current is None:
            assert word == "ARG", word
            key, _, value = rest.partition("=")
            arguments[key] = value
        else:
            current.said.append((word, rest.strip()))
    return arguments, stages


def containerfile() -> tuple[dict[str, str], dict[str, Stage]]:
    return read((ROOT / "deploy" / "Containerfile").read_text())
