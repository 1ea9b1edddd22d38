"""A model for agents whose own prompts are longer than the demo model's context.

The demo model's shape with two layers, made-up weights and a context of 65,536 tokens. A prompt of 20,000
tokens takes seconds on two cores. Its answers mean nothing, and end after some 80 tokens.
"""

import json
import shutil
from pathlib import Path
from typing import Final

LAYERS: Final = 2
CONTEXT_TOKENS: Final = 65_536
END_EVERY: Final = 80
"""One token in this many ends an answer."""
MARK: Final = "baton.json"
"""Baton's own note on a model that it converted."""
COPIED: Final = ("*.json", "*.jinja")


def write_long_model(demo: Path, folder: Path) -> Path:
    """Write the model's files, all but weights, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in COPIED:
        for path in demo.glob(pattern):
            if path.name != MARK:
                shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": LAYERS, "max_position_embeddings": CONTEXT_TOKENS}
    ends = [config["eos_token_id"], *range(END_EVERY, config["vocab_size"], END_EVERY)]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    return folder
