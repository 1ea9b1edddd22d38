"""Recorded outcomes of the trials on vLLM's engine (`tests/vllm/model_sweep.py`), for docs/models.md."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import transformers

from tests.models.comparison import Outcome, TrialVerdict

FILE: Final = Path(__file__).with_name("vllm_outcomes.json")


@dataclass(frozen=True, slots=True)
class VllmOutcomes:
    """Outcomes by model type, and the versions that they are of."""

    vllm: str
    transformers: str
    types: Mapping[str, Outcome]

    @classmethod
    def read(cls) -> "VllmOutcomes":
        stored = json.loads(FILE.read_text(encoding="utf-8"))
        types = {
            kind: Outcome(TrialVerdict(verdict), words) for kind, (verdict, words) in stored["types"].items()
        }
        return cls(stored["vllm"], stored["transformers"], types)

    def replacing(self, outcomes: Mapping[str, Outcome], *, is_all: bool) -> "VllmOutcomes":
        """Return these with new `outcomes`, in the environment of vLLM. `is_all`: leave out all others."""
        import vllm

        types = outcomes if is_all else {**self.types, **outcomes}
        return VllmOutcomes(vllm.__version__, transformers.__version__, types)

    def write(self) -> None:
        types = {kind: [each.verdict, each.words] for kind, each in sorted(self.types.items())}
        lines = ",\n".join(f"  {json.dumps(kind)}: {json.dumps(each)}" for kind, each in types.items())
        head = f'{{"vllm": "{self.vllm}", "transformers": "{self.transformers}", "types": {{'
        FILE.write_text(f"{head}\n{lines}\n}}}}\n", encoding="utf-8")
