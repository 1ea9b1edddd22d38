"""Fingerprint of a model: a hash of its configuration, followed by one of its weights.

A router that has no weights knows the first part, and compares it with the workers' whole fingerprints.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from baton.models.model_requirements import Json

CONFIG_DIGITS: Final = 16
"""Number of hexadecimal digits of a fingerprint that come from the model's configuration."""
WEIGHT_DIGITS: Final = 32
"""Number of hexadecimal digits of a fingerprint that come from the model's weights."""
SAMPLES: Final = 32
SAMPLE_BYTES: Final = 64 * 2**10
VOLATILE: Final = frozenset({"_name_or_path", "_model_name_or_path", "transformers_version"})


def config_digest(config: Json) -> str:
    """Return the configuration's part of a fingerprint. The model's path and the library's version do not
    count."""
    stable = {key: value for key, value in config.items() if key not in VOLATILE}
    return hashlib.sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()[:CONFIG_DIGITS]


def weights_digest(files: Iterable[tuple[Path, bytes]]) -> str:
    """Return the weights' part of a fingerprint. `files`: path and header of each safetensors file."""
    digest = hashlib.sha256()
    for path, header in files:
        digest.update(path.name.encode() + b"\0" + header + sampled_digest(path))
    return digest.hexdigest()[:WEIGHT_DIGITS]


def sampled_digest(path: Path) -> bytes:
    """Return a hash of a large file's size, beginning, end and evenly spaced samples.

    It is fast, and in practice differs for other weights of the same shapes.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        digest.update(size.to_bytes(8, "little"))
        for sample in range(SAMPLES + 1):
            file.seek(max(0, (size - SAMPLE_BYTES) * sample // SAMPLES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
