"""Loading of a model directory, or of one rank's part of it, as a checked definition."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging as library_logging

from baton.engine.available_memory import memory_shortage
from baton.engine.device import find_device
from baton.engine.kv_cache import DTYPES
from baton.engine.loading.capability_probes import refuse_by_configuration
from baton.engine.loading.library_loading import (
    check_logits,
    library_errors_in_a_line,
    load_definition,
    make_definition,
    read_configuration,
)
from baton.engine.loading.library_model import LibraryModel
from baton.engine.loading.library_report import first_line
from baton.engine.loading.model_partition import partition_stages, partition_weights
from baton.engine.loading.rank_shard import RankShard, find_rank_shard
from baton.engine.loading.rope_frequencies import fix_rope_frequencies
from baton.engine.loading.text_model import maker_of
from baton.engine.loading.weight_files import (
    DummyWeights,
    Files,
    bytes_of,
    fill,
    plain_sources,
    weights_in,
)
from baton.engine.quantization.checkpoint_tensors import refuse_quantized_files
from baton.engine.quantization.weight_quantization import WeightQuantization, code
from baton.engine.ranks.collectives import Team
from baton.models.checkpoint_quantization import CheckpointQuantization, read_quantization
from baton.models.model_facts import (
    ModelFacts,
    ModelUnreadable,
    UnsupportedModel,
    own_name,
    read_model,
    weight_files,
)
from baton.runtime.errors import StartupError
from baton.runtime.logging import Log
from baton.runtime.model_options import LoadFormat

log = Log(__name__)


def load_model(
    directory: Path,
    dtype: str,
    device: str,
    team: Team | None = None,
    load_format: LoadFormat = LoadFormat.AUTO,
    context_length: int = 0,
    coding: WeightQuantization | None = None,
) -> LibraryModel:
    """Load the model in `directory`, or the part of it that the rank of `team` has.

    `dtype`: "bfloat16" or "float32", in which weights are loaded at once. `device`: "auto", "cpu" or
    "cuda[:N]". `load_format`: real or dummy weights. `context_length`: most tokens of a sequence, 0 for what
    the configuration says. `coding`: how weights are quantized, of a model on one rank.
    Exchanges nothing with other ranks.

    Raises ModelNotFound, ModelUnreadable, ContextTooLong, UnsupportedModel, CannotSplit, DeviceNotFound or
    StartupError.
    """
    with library_errors_in_a_line(directory):
        dummy = load_format is LoadFormat.DUMMY
        return _load_model(directory, dtype, device, team, dummy, context_length, coding)


def _load_model(
    directory: Path,
    dtype: str,
    device: str,
    team: Team | None,
    dummy: bool,
    context_length: int,
    coding: WeightQuantization | None,
) -> LibraryModel:
    place = find_device(device, 0 if team is None else team.rank)
    library_logging.disable_progress_bar()
    how = read_quantization(directory)
    missing = () if how is None else how.missing
    try:
        facts = read_model(directory, dummy=dummy, context_length=context_length)
    except UnsupportedModel as found:
        if found.needs:
            _refuse_all(directory, found, missing)
        raise
    config = read_configuration(directory, facts.name)
    refuse_by_configuration(facts.name, config, missing)
    fix_rope_frequencies(facts.name, config, facts.context_length)
    if team is not None and team.topology.ranks > 1:
        shard = find_rank_shard(facts.name, config, team)
        module = _load_shard(directory, facts.name, config, shard, dtype, place, how, dummy=dummy)
        return LibraryModel(module, facts, dtype, place, shard)
    if not dummy and how is None:
        refuse_quantized_files(directory)
        # The numbers in files have 2 to 4 bytes: the memory check uses the least that they can take here.
        # While weights are quantized, a weight and its codes of one byte a number are both in memory.
        of_number = DTYPES[dtype].itemsize + (0 if coding is None else 1)
        _check_memory(directory, place, _file_bytes(directory) * of_number // 4)

    def load(*, ours: bool = True) -> Any:
        if dummy:
            return _load_dummies(directory, facts.name, config, dtype, place, ours=ours)
        if how is None:
            module = load_definition(
                directory, facts.name, config, DTYPES[dtype], maker_of(config), ours=ours
            )
        else:
            module = _load_quantized(directory, facts.name, config, dtype, place, how, ours=ours)
        return module.eval().requires_grad_(False)

    try:
        return _over_pages(load, facts, dtype, place, coding)
    except UnsupportedModel as refused:
        if coding is None:
            _clear_frames(refused)
            with suppress(UnsupportedModel):
                return _row_by_row(load, facts, dtype, place)
        raise


def _refuse_all(directory: Path, found: UnsupportedModel, missing: Sequence[str]) -> None:
    """Raise UnsupportedModel with the needs that were `found`, those `missing`, and the configuration's."""
    name = own_name(directory)
    try:
        config = read_configuration(directory, name)
    except UnsupportedModel:  # a type that the library does not know
        raise found from None
    refuse_by_configuration(name, config, (*found.needs, *missing))


def _over_pages(
    load: Callable[..., Any],
    facts: ModelFacts,
    dtype: str,
    device: torch.device,
    coding: WeightQuantization | None,
) -> LibraryModel:
    """Load a definition that computes with our attention. Raises UnsupportedModel."""

    def quantized_module() -> Any:
        module = load()
        if coding is not None:
            code(facts.name, module, coding)
        return module.to(device)

    module = load()
    check_logits(facts.name, module)
    codes = None if coding is None else code(facts.name, module, coding)
    multiplied = codes if coding is not None and coding.multiplied else None
    return LibraryModel(module.to(device), facts, dtype, device, load=quantized_module, quantized=multiplied)


def _clear_frames(error: BaseException) -> None:
    """Release what the frames of `error` hold, so that weights are not held twice."""
    raised: BaseException | None = error
    while raised is not None:
        traceback.clear_frames(raised.__traceback__)
        raised = raised.__cause__ or raised.__context__


def _row_by_row(
    load: Callable[..., Any], facts: ModelFacts, dtype: str, device: torch.device
) -> LibraryModel:
    """Load a definition that has or needs its own attention. Raises UnsupportedModel."""
    model = LibraryModel(load(ours=False).to(device), facts, dtype, device, row_by_row=True)
    log.info("each row of a step is computed by itself, by the model library with its own attention")
    return model


def _load_quantized(
    directory: Path,
    name: str,
    config: Any,
    dtype: str,
    device: torch.device,
    how: CheckpointQuantization,
    *,
    ours: bool,
) -> Any:
    """Load a quantized checkpoint as plain numbers."""
    empty = make_definition(name, config, dtype, ours=ours)
    size = bytes_of(empty, {})
    _check_memory(directory, device, size)
    _log_dequantization(directory, how, size)
    with _open_weights(directory, how, dtype) as weights:
        return load_definition(
            directory, name, empty.config, DTYPES[dtype], type(empty), weights.pending(), ours=ours
        )


@contextmanager
def _open_weights(directory: Path, how: CheckpointQuantization | None, dtype: str) -> Iterator[Files]:
    try:
        with weights_in(directory, how, DTYPES[dtype]) as weights:
            yield weights
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ModelUnreadable(f"{directory}: the weights cannot be loaded: {first_line(error)}") from error


def _log_dequantization(directory: Path, how: CheckpointQuantization, size: int) -> None:
    """`size`: bytes of the weights in memory."""
    log.info(
        "weights are dequantised as they are loaded",
        method=how.method,
        file_bytes=_file_bytes(directory),
        bytes=size,
    )
    if how.of_the_cache:
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


def _load_shard(
    directory: Path,
    name: str,
    config: Any,
    shard: RankShard,
    dtype: str,
    device: torch.device,
    how: CheckpointQuantization | None,
    *,
    dummy: bool,
) -> Any:
    """Load one rank's part of a model."""
    module = make_definition(name, config, dtype)
    check_logits(name, module)
    with nullcontext() if dummy else _open_weights(directory, how, dtype) as files:
        sources = plain_sources(DummyWeights(module, device)) if files is None else files.sources(module)
        stage = partition_stages(name, module, shard)
        cuts = partition_weights(name, module, shard)
        size = bytes_of(module, cuts)
        _check_memory(directory, device, size)
        if how is not None and files is not None:
            _log_dequantization(directory, how, size)
        fill(module, cuts, sources, device)
    module.to(device).eval()
    return stage


def _check_memory(directory: Path, device: torch.device, least: int) -> None:
    """Raise StartupError if the weights, at least `least` bytes, cannot fit."""
    short = memory_shortage(device, least)
    if short is not None:
        raise StartupError(f"the model {directory} takes at least {least} bytes on {device}, and {short}")
