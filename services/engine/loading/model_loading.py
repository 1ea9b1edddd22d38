"""Loading of a model directory, or of one rank's part of it, as a checked model of the transformers
library."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging as library_logging

from baton.engine.execution.row_cache import stores_states
from baton.engine.execution.state_mixers import StateMixer
from baton.engine.loading.capability_probes import refuse_by_configuration
from baton.engine.loading.library_loading import (
    check_library_version,
    check_logits,
    library_errors_in_a_line,
    load_definition,
    make_definition,
    read_configuration,
)
from baton.engine.loading.library_model import LibraryModel
from baton.engine.loading.library_report import first_line
from baton.engine.loading.model_partition import partition_stages, partition_weights
from baton.engine.loading.rank_shard import RankShard, StoredStates, find_rank_shard
from baton.engine.loading.rope_frequencies import fix_rope_frequencies
from baton.engine.loading.state_batching import check_rank_states
from baton.engine.loading.state_probe import probe_without_weights, refuse_divided_mixers, wrap_at
from baton.engine.loading.text_model import maker_of, text_of
from baton.engine.loading.weight_files import (
    DummyWeights,
    WeightFiles,
    bytes_of,
    fill,
    plain_sources,
    weights_in,
)
from baton.engine.quantization.checkpoint_tensors import refuse_quantized_files
from baton.engine.quantization.weight_quantization import WeightQuantization, quantize_model
from baton.inference.available_memory import memory_shortage
from baton.inference.collectives import Collectives
from baton.inference.device import find_device
from baton.inference.kv_memory import DTYPES
from baton.models.checkpoint_quantization import CheckpointQuantization, read_quantization
from baton.models.engine_features import missing_in_torch
from baton.models.model_facts import (
    CONFIG_FILE,
    ModelFacts,
    ModelUnreadable,
    UnsupportedModel,
    json_object,
    own_name,
    read_model,
    weight_files,
)
from baton.models.model_requirements import Json, text_words
from baton.runtime.errors import StartupError
from baton.runtime.logging import Log
from baton.runtime.model_options import LoadFormat

log = Log(__name__)


def load_model(
    directory: Path,
    dtype: str,
    device: str,
    rank_group: Collectives | None = None,
    load_format: LoadFormat = LoadFormat.AUTO,
    context_length: int = 0,
    quantization: WeightQuantization | None = None,
) -> LibraryModel:
    """Load the model in `directory`, or the part of it that belongs to the rank of `rank_group`.

    `dtype`: "bfloat16" or "float32", in which weights are loaded at once. `device`: "auto", "cpu" or
    "cuda[:N]". `load_format`: real or dummy weights. `context_length`: most tokens of a sequence, 0 for what
    the configuration says. `quantization`: how weights are quantized, of a model on one rank.
    Exchanges nothing with other ranks.

    Raises ModelNotFound, ModelUnreadable, ContextTooLong, UnsupportedModel, CannotSplit, DeviceNotFound or
    StartupError.
    """
    check_library_version()
    with library_errors_in_a_line(directory):
        dummy = load_format is LoadFormat.DUMMY
        return _load_model(directory, dtype, device, rank_group, dummy, context_length, quantization)


def _load_model(
    directory: Path,
    dtype: str,
    device: str,
    rank_group: Collectives | None,
    dummy: bool,
    context_length: int,
    quantization: WeightQuantization | None,
) -> LibraryModel:
    target = find_device(device, 0 if rank_group is None else rank_group.rank)
    library_logging.disable_progress_bar()
    checkpoint = read_quantization(directory)
    words = json_object(directory / CONFIG_FILE, required=True)
    missing = missing_in_torch(words, checkpoint)
    if missing:
        _refuse_all(directory, words, missing)
    facts = read_model(directory, dummy=dummy, context_length=context_length)
    config = read_configuration(directory, facts.name)
    refuse_by_configuration(facts.name, config, missing)
    fix_rope_frequencies(facts.name, config, facts.context_length)
    has_states = stores_states(text_of(config))
    if has_states and quantization is not None:
        raise UnsupportedModel(
            f"the model {facts.name} ({config.model_type}) cannot be served with {quantization}: it needs "
            "states of layers, which are computed over plain weights"
        )
    if rank_group is not None and rank_group.topology.ranks > 1:
        return _load_rank(directory, facts, config, rank_group, dtype, target, checkpoint, dummy=dummy)
    if not dummy and checkpoint is None:
        refuse_quantized_files(directory)
        # The numbers in files have 2 to 4 bytes: the memory check uses the least that they can take here.
        # While weights are quantized, a weight and its codes of one byte a number are both in memory.
        of_number = DTYPES[dtype].itemsize + (0 if quantization is None else 1)
        _check_memory(directory, target, _file_bytes(directory) * of_number // 4)

    def load(*, ours: bool = True) -> Any:
        if dummy:
            return _load_dummies(directory, facts.name, config, dtype, target, ours=ours)
        if checkpoint is None:
            module = load_definition(
                directory, facts.name, config, DTYPES[dtype], maker_of(config), ours=ours
            )
        else:
            module = _load_quantized(directory, facts.name, config, dtype, target, checkpoint, ours=ours)
        return module.eval().requires_grad_(False)

    if has_states:
        return load_row_by_row(load, facts, dtype, target)
    try:
        return _over_pages(load, facts, dtype, target, quantization)
    except UnsupportedModel as refused:
        if quantization is None:
            _clear_frames(refused)
            with suppress(UnsupportedModel):
                return load_row_by_row(load, facts, dtype, target)
        raise


def _refuse_all(directory: Path, words: Json, missing: Sequence[str]) -> None:
    """Raise UnsupportedModel with what is `missing` by the `words` of the model's configuration file, and
    what the library's configuration adds."""
    name = own_name(directory)
    try:
        config = read_configuration(directory, name)
    except UnsupportedModel:  # a type that the library does not know
        raise UnsupportedModel.needing(name, text_words(words).get("model_type"), missing) from None
    refuse_by_configuration(name, config, missing)


def _over_pages(
    load: Callable[..., Any],
    facts: ModelFacts,
    dtype: str,
    device: torch.device,
    quantization: WeightQuantization | None,
) -> LibraryModel:
    """Load a model that computes with our attention over pages. Raises UnsupportedModel if it cannot."""

    def quantized_module() -> Any:
        module = load()
        if quantization is not None:
            quantize_model(facts.name, module, quantization)
        return module.to(device)

    module = load()
    check_logits(facts.name, module)
    codes = None if quantization is None else quantize_model(facts.name, module, quantization)
    multiplied = codes if quantization is not None and quantization.multiplied else None
    return LibraryModel(module.to(device), facts, dtype, device, load=quantized_module, quantized=multiplied)


def _clear_frames(error: BaseException) -> None:
    """Release the local variables in the frames of `error`, so that weights are not in memory twice."""
    raised: BaseException | None = error
    while raised is not None:
        traceback.clear_frames(raised.__traceback__)
        raised = raised.__cause__ or raised.__context__


def load_row_by_row(
    load: Callable[..., Any], facts: ModelFacts, dtype: str, device: torch.device
) -> LibraryModel:
    """Load a model that computes row by row with its own attention. Raises UnsupportedModel."""
    model = LibraryModel(load(ours=False).to(device), facts, dtype, device, row_by_row=True)
    log.info("each row of a step is computed by itself, by the model library with its own attention")
    return model


def _load_quantized(
    directory: Path,
    name: str,
    config: Any,
    dtype: str,
    device: torch.device,
    checkpoint: CheckpointQuantization,
    *,
    ours: bool,
) -> Any:
    """Load a quantized checkpoint, with its weights dequantized to plain numbers."""
    empty = make_definition(name, config, dtype, ours=ours)
    size = bytes_of(empty, {})
    _check_memory(directory, device, size)
    _log_dequantization(directory, checkpoint, size)
    with _open_weights(directory, checkpoint, dtype) as weights:
        return load_definition(
            directory, name, empty.config, DTYPES[dtype], type(empty), weights.pending(), ours=ours
        )


@contextmanager
def _open_weights(
    directory: Path, checkpoint: CheckpointQuantization | None, dtype: str
) -> Iterator[WeightFiles]:
    try:
        with weights_in(directory, checkpoint, DTYPES[dtype]) as weights:
            yield weights
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ModelUnreadable(f"{directory}: the weights cannot be loaded: {first_line(error)}") from error


def _log_dequantization(directory: Path, checkpoint: CheckpointQuantization, size: int) -> None:
    """Log that a checkpoint is dequantized as it is loaded. `size`: bytes of its weights in memory."""
    log.info(
        "weights are dequantised as they are loaded",
        method=checkpoint.method,
        file_bytes=_file_bytes(directory),
        bytes=size,
    )
    if checkpoint.of_the_cache:
        log.warning("the checkpoint's scheme for its KV cache is passed over: KV is kept as --dtype says")


def _file_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(directory))


def _load_dummies(
    directory: Path, name: str, config: Any, dtype: str, device: torch.device, *, ours: bool
) -> Any:
    module = make_definition(name, config, dtype, ours=ours)
    _check_memory(directory, device, bytes_of(module, {}))
    fill(module, {}, plain_sources(DummyWeights(module, device)), device)
    return module.to(device).eval()


def _load_rank(
    directory: Path,
    facts: ModelFacts,
    config: Any,
    rank_group: Collectives,
    dtype: str,
    device: torch.device,
    checkpoint: CheckpointQuantization | None,
    *,
    dummy: bool,
) -> LibraryModel:
    """Load the part of a model that belongs to the rank of `rank_group`."""
    stored: StoredStates | None = None
    mixers: dict[str, StateMixer] = {}
    if stores_states(text_of(config)):
        stored, mixers = probe_without_weights(make_definition(facts.name, config, dtype), facts)
    shard = find_rank_shard(facts.name, config, rank_group, stored)
    module = make_definition(facts.name, config, dtype)
    own = [each for each in wrap_at(module, mixers) if each.layer in shard.layers]
    stage = _load_shard(directory, facts.name, module, shard, mixers, dtype, device, checkpoint, dummy=dummy)
    model = LibraryModel(stage, facts, dtype, device, shard, mixers=own)
    if stored is not None:
        check_rank_states(model, rank_group.topology, rank_group.rank)
    return model


def _load_shard(
    directory: Path,
    name: str,
    module: Any,
    shard: RankShard,
    mixers: Mapping[str, StateMixer],
    dtype: str,
    device: torch.device,
    checkpoint: CheckpointQuantization | None,
    *,
    dummy: bool,
) -> Any:
    """Load one rank's part of a model, and return the modules that its pipeline stage runs.

    `module`: the whole implementation without memory for its weights. `mixers`: its state mixers by path.
    """
    check_logits(name, module)
    with nullcontext() if dummy else _open_weights(directory, checkpoint, dtype) as files:
        sources = plain_sources(DummyWeights(module, device)) if files is None else files.sources(module)
        stage = partition_stages(name, module, shard)
        cuts = partition_weights(name, module, shard)
        refuse_divided_mixers(name, module, mixers, cuts)
        size = bytes_of(module, cuts)
        _check_memory(directory, device, size)
        if checkpoint is not None and files is not None:
            _log_dequantization(directory, checkpoint, size)
        fill(module, cuts, sources, device)
    module.to(device).eval()
    return stage


def _check_memory(directory: Path, device: torch.device, least: int) -> None:
    """Raise StartupError if the model's weights, at least `least` bytes, cannot fit on `device`."""
    short = memory_shortage(device, least)
    if short is not None:
        raise StartupError(f"the model {directory} takes at least {least} bytes on {device}, and {short}")
