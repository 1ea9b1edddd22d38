"""Check that a model can be divided among the ranks of a worker, by its configuration.

It comes before any rank is started.
"""

import json
from pathlib import Path
from typing import Any, Final

from baton.models.model_files import prepare, resolve
from baton.pages.errors import DoesNotDivide
from baton.pages.layout import KvLayout, full_group
from baton.pages.rank_layout import rank_layout
from baton.runtime.errors import StartupError
from baton.runtime.logging import Log
from baton.runtime.model_options import LoadFormat
from baton.runtime.worker_settings import WorkerSettings

log = Log(__name__)

FLAGS: Final = {"tensor_parallel": "--tp", "pipeline_parallel": "--pp"}


class ShapeRefused(StartupError):
    """The model cannot be divided among the ranks. The text names the flag and the number."""


def check_shape(settings: WorkerSettings) -> None:
    """Check that the worker's model can be divided among its ranks.

    Raises ShapeRefused, and StartupError for a missing model. If the configuration does not state the model's
    size, the ranks refuse the model when they load it.
    """
    source = resolve(settings.model, LoadFormat(settings.load_format))
    directory = prepare(source, lambda line: log.info("preparing the model", step=line))
    config = _text_config(directory)
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    kv_heads = 1 if config.get("kv_lora_rank") else config.get("num_key_value_heads") or heads
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(kv_heads, int)):
        return
    topology = settings.topology
    if heads % topology.tensor:
        raise ShapeRefused(
            f"--tp {topology.tensor}: the model has {heads} attention heads, which is no multiple of it"
        )
    group = full_group("", 1, tuple(range(layers)), tuple(range(kv_heads)), 1)
    try:
        rank_layout(KvLayout("", (group,)), topology, 0)
    except DoesNotDivide as error:
        raise ShapeRefused(str(error).replace(error.field, FLAGS[error.field])) from error


def _text_config(directory: Path) -> dict[str, Any]:
    """Return the part of config.json that describes the language model, or an empty mapping."""
    try:
        config = json.loads((directory / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}  # the ranks refuse it with the reason
    text = config.get("text_config") if isinstance(config, dict) else None
    return text if isinstance(text, dict) else config if isinstance(config, dict) else {}
