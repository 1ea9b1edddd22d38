"""How does a model directory become a module that computes logits over our pages?

The definition is the model library's own; only its attention is ours, and how several ranks share it.
"""

import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig
from transformers.utils import logging as library_logging

from baton.engine.available_memory import memory_shortage
from baton.engine.device import find_device
from baton.engine.execution.attention_span import AttentionSpan, LayerAttention
from baton.engine.execution.compiled_step import CompiledModel, CompiledSteps, KernelFor, check, narrow
from baton.engine.execution.exact_reference import exactly
from baton.engine.execution.fused_decoder import FusedDecoder
from baton.engine.execution.model_structure import (
    TURNED,
    TURNS,
    ModelStructure,
    UnknownStructure,
    find_structure,
)
from baton.engine.execution.paged_attention import NAME, AttentionFunction, PagedAttention, use_attention
from baton.engine.execution.row_by_row import Definition, RowSteps, judge
from baton.engine.execution.step_compiler import CODES, builds
from baton.engine.kv_cache import DTYPES, PagedKvCache
from baton.engine.loading.capability_probes import (
    COUNTING,
    AttentionProbe,
    CountedPositions,
    Geometry,
    places,
    recording_masks,
    refuse_by_configuration,
)
from baton.engine.loading.library_report import load_report
from baton.engine.loading.model_partition import partition_stages, partition_weights
from baton.engine.loading.rank_shard import RankShard, find_rank_shard
from baton.engine.loading.rope_frequencies import fix_rope_frequencies
from baton.engine.loading.single_experts import joining_single_experts
from baton.engine.loading.text_model import attention_of, let_go, maker_of
from baton.engine.loading.weight_files import (
    DummyWeights,
    Files,
    bytes_of,
    empty_module,
    fill,
    plain_sources,
    weights_in,
)
from baton.engine.quantization.checkpoint_tensors import refuse_quantized_files
from baton.engine.quantization.quantized_weight import QuantizedWeight
from baton.engine.quantization.weight_quantization import WeightQuantization, code
from baton.engine.ranks.collectives import Team
from baton.engine_interface import RankGroupBroken
from baton.models.checkpoint_quantization import Quantisation, quantisation_of
from baton.models.model_facts import (
    CONFIG_FILE,
    ModelFacts,
    ModelUnreadable,
    UnsupportedModel,
    json_object,
    own_name,
    read_model,
    reading,
    weight_files,
)
from baton.models.model_requirements import ALIASES, canonical
from baton.runtime.errors import StartupError, in_a_line
from baton.runtime.logging import Log
from baton.runtime.model_options import LoadFormat

log = Log(__name__)

LINE_CHARACTERS: Final = 300
FAILURES: Final = (RuntimeError, AttributeError, TypeError, ValueError, LookupError)
"""What a definition raises that does not compute with what it is given."""


class Model:
    """A loaded model, or one rank's share of it. Used from one thread at a time."""

    def __init__(
        self,
        module: Any,
        facts: ModelFacts,
        dtype: str,
        device: torch.device,
        share: RankShard | None = None,
        load: Callable[[], Any] | None = None,
        codes: Mapping[torch.nn.Linear, QuantizedWeight] | None = None,
        *,
        by_row: bool = False,
    ) -> None:
        """`load`: gives `module` once more. `codes`: of its weights, to compute with. `by_row`: its attention
        is not ours. Looks at small forward passes, without other ranks: the last is at the context's end,
        where a table of positions may be too short. Raises UnsupportedModel."""
        self.facts = facts
        self.dtype = dtype
        self.device = device
        self._module = module
        self._share = share
        self._load = load
        self._codes = None if codes is None else dict(codes)
        self.coded = codes is not None
        """Its weights are kept as codes, over which a kernel alone computes."""
        self._decoder: FusedDecoder | None = None
        self._compiled: CompiledModel | None = None
        self._definition = Definition(module) if by_row else None
        self._tells_places = False
        takes = inspect.signature(module.forward).parameters
        self._cache_word = "cache" if "cache" in takes else "past_key_values"
        self.geometry: Geometry
        self.sights: Mapping[int, LayerAttention]
        """How each layer looks, by its id: of those that look by our attention."""
        if self._definition is None:
            self.geometry, self.sights, width = self._judged(module)
        else:
            self.geometry, self.sights, width = self._judged_by_row(self._definition)
        self.reaches = {layer: sight.reach for layer, sight in self.sights.items() if sight.reach is not None}
        """Of the layers that do not see all of a context."""
        self.vocab_size: int = width
        self._weight_bytes: int = _bytes_of_a_step(module)
        self.products: Counter[tuple[int, int]] = Counter(
            (each.out_features, each.in_features)
            for each in module.modules()
            if isinstance(each, torch.nn.Linear)
        )
        """How many linear layers of which [out, in] there are."""

    def _judged(self, module: Any) -> tuple[Geometry, Mapping[int, LayerAttention], int]:
        """What our attention is asked for, and how many logits there are. Raises UnsupportedModel."""
        facts, device, share = self.facts, self.device, self._share
        probe, whole, counted = (AttentionProbe(facts.context_length) for _ in range(3))
        order = places(facts.context_length).to(device)
        tokens = torch.arange(len(order), device=device)[None] % facts.vocab_size
        last = order.new_tensor([len(order) - 1])
        try:
            with nullcontext() if share is None else share.link.cut():
                finds = self._finds_places(tokens, last)
                logits = self.logits(tokens[:, order], order[None], last, probe)
                with recording_masks():
                    self.logits(tokens, None, last, whole)
                self.logits(tokens[:, order], None, last, counted)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            raise _not_over_pages(facts.name, module.config, error) from error
        if not finds:
            probe.miss(COUNTING)
        if logits is not None and len(logits) != len(last):
            probe.miss("logits of the positions that are asked for alone")
        layers = None if share is None else share.layers
        seen = probe.verdict(whole, counted, order, self.dtype, facts.name, module.config, layers)
        if share is not None and seen != share.seen:
            raise UnsupportedModel(
                f"the model {facts.name} ({module.config.model_type}) cannot be served by several ranks: its "
                f"attention has {_heads_of(seen)} on a rank, where {_heads_of(share.seen)} were expected"
            )
        width = facts.vocab_size if share is not None or logits is None else logits.shape[1]
        return seen if share is None else share.whole, whole.sights, width

    def _judged_by_row(self, definition: Definition) -> tuple[Geometry, Mapping[int, LayerAttention], int]:
        try:
            geometry = judge(self.facts, definition, self.device, self.dtype)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            raise _not_over_pages(self.facts.name, definition.config, error) from error
        return geometry, {}, self.facts.vocab_size

    @property
    def weight_bytes(self) -> int:
        """What a step reads of the weights, whatever it computes."""
        return self._weight_bytes if self._compiled is None else self._compiled.weight_bytes

    def compute(
        self, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, step: PagedAttention
    ) -> torch.Tensor | None:
        """As `logits`, by the fastest way that this model has without `compiled_steps`."""
        if self._decoder is None:
            return self.logits(tokens, positions, keep, step)
        with torch.inference_mode():
            return self._decoder.logits(tokens, positions, keep, step)

    @property
    def taken_apart(self) -> bool:
        """Steps are computed in our own way, not by the library's definition."""
        return self._decoder is not None or self._compiled is not None

    @property
    def by_row(self) -> bool:
        """They are computed by the library's definition, one row after the other."""
        return self._definition is not None

    @property
    def compiled(self) -> bool:
        """They are computed by a kernel."""
        return self._compiled is not None

    def take_apart(self, kernel_for: KernelFor | None = None, page_tokens: int = 0) -> None:
        """From now on `compute` goes without the library's definition, whose weights are laid out anew: they
        are not held twice. With `kernel_for` they are laid out for a kernel, and `compiled_steps` compute,
        over pages of `page_tokens`. Raises UnknownStructure, UnsupportedShapes, which no kernel knows, or KernelUnavailable:
        nothing has changed."""
        anatomy = self.anatomy()
        if kernel_for is not None:
            numbers = check(anatomy, self.geometry.head_dim, page_tokens, self.reaches.values())
            builds(numbers)  # before all weights are looked at
            weights = CODES
            if self._codes is None:
                weights = torch.bfloat16 if narrow(anatomy.linears) else torch.float32
            kernel = kernel_for(numbers, weights)
        self._module = None
        with torch.inference_mode():
            if kernel_for is None:
                self._decoder = FusedDecoder(anatomy, self.geometry.head_dim)
            else:
                self._compiled = CompiledModel(anatomy, self.geometry.head_dim, kernel, self._codes)

    def compiled_steps(
        self, cache: PagedKvCache, reaches: Mapping[int, AttentionSpan] | None = None
    ) -> CompiledSteps | None:
        """Over this cache, where the model was taken apart for a kernel. `reaches`: others than its own."""
        if self._compiled is None:
            return None
        return CompiledSteps(self._compiled, cache, self.reaches if reaches is None else reaches)

    def anatomy(self) -> ModelStructure:
        """The parts of the library's definition. Raises UnknownStructure."""
        anatomy = find_structure(self._module, self.geometry.head_dim, self.sights.values())
        if not self._only_turns:
            raise UnknownStructure("queries or keys that their position does more to than turn them")
        return anatomy

    def exactly(self) -> AbstractContextManager[None]:
        """Within it the library's definition, of the common anatomy, computes in float32."""
        return exactly(self._module, self._codes or {})

    def row_steps(self, cache: PagedKvCache) -> RowSteps | None:
        """Over this cache, where every row is computed by itself: this model has no other way then."""
        return None if self._definition is None else RowSteps(self._definition, self.vocab_size, cache)

    def put_together(self) -> None:
        """Undo `take_apart`: the weights are loaded again. Raises what `load_model` raises."""
        self._decoder = self._compiled = self._module = None
        if self._load is None:
            raise AssertionError("a share of a model was taken apart")
        self._module = self._load()

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        keep: torch.Tensor,
        attend: AttentionFunction,
        told: CountedPositions | None = None,
    ) -> torch.Tensor | None:
        """[N, vocabulary] logits, in the model's dtype, at the places `keep` [N] of the flat batch `tokens`
        [1, T] at `positions` [1, T], which the definition counts itself if there are none, from what is
        `told`: by the library's definition. Every rank calls it; one of them gets the logits, the others
        None."""
        if told is None and positions is not None and self._tells_places:
            told = CountedPositions(positions[0] - torch.arange(positions.shape[1], device=self.device))
        share, given = self._share, {} if told is None else {self._cache_word: told}
        with torch.inference_mode(), use_attention(attend):
            if share is not None and not share.last:
                answer = self._module(input_ids=tokens, position_ids=positions, use_cache=False, **given)
                share.link.team.send(answer.last_hidden_state)
                return None
            answer = self._module(
                input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep, **given
            )
        logits: torch.Tensor = answer.logits[0]
        return logits if share is None or share.has_logits else None

    def _finds_places(self, tokens: torch.Tensor, keep: torch.Tensor) -> bool:
        """Whether the definition gives at the context's end what it gives where it counts by a cache. If it
        does only when it is told what it asks a cache for, every step tells it: queries that are scaled by
        the length of a sequence are."""
        late = AttentionProbe(self.facts.context_length)
        begin = self.facts.context_length - tokens.shape[1]
        where = torch.arange(tokens.shape[1], device=self.device)[None] + begin
        self.logits(tokens, where, keep, late)
        counted = self._seen(tokens, None, keep, CountedPositions(begin))
        if counted is None:  # it asks a cache for more than that, and is judged by the other passes
            return True
        if late.like(counted, self.dtype):
            return True
        self._tells_places = True
        told = self._seen(tokens, where, keep)
        self._tells_places = told is not None and told.like(counted, self.dtype)
        return self._tells_places

    def _seen(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        keep: torch.Tensor,
        told: CountedPositions | None = None,
    ) -> AttentionProbe | None:
        """What a pass asks attention for; None where the definition does not compute with that."""
        probe = AttentionProbe(self.facts.context_length)
        try:
            self.logits(tokens, positions, keep, probe, told)
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            return None
        return probe

    @cached_property
    def _only_turns(self) -> bool:
        """Queries and keys of some tokens are as long at the context's end as at its beginning: what the
        position does to them there may be a rotation."""
        where = torch.arange(TURNED, device=self.device)[None]
        context = self.facts.context_length
        first, last = AttentionProbe(context), AttentionProbe(context)
        for probe, begin in ((first, 0), (last, max(context - TURNED, 0))):
            self.logits(where % self.vocab_size, where + begin, where[0, :1], probe)
        return last.turned(first, TURNS[self.dtype])

    def weights(self) -> list[torch.Tensor]:
        """Every weight of the library's definition once, tied ones too."""
        return [each.data for each in self._module.parameters()]


def load_model(
    directory: Path,
    dtype: str,
    device: str,
    team: Team | None = None,
    load_format: LoadFormat = LoadFormat.AUTO,
    context_length: int = 0,
    coding: WeightQuantization | None = None,
) -> Model:
    """Load the model in `directory`, or the share of it that `team`'s rank has, straight in `dtype`
    ("bfloat16" or "float32") on `device` ("auto", "cpu" or "cuda[:N]"). `load_format`: whether with its own
    weights. `context_length`: most tokens of a sequence; 0 for what the configuration says. `coding`: how
    weights become codes, of a model that is not shared. Says nothing to the team.

    Raises ModelNotFound, ModelUnreadable, ContextTooLong, UnsupportedModel, CannotSplit, DeviceNotFound or
    StartupError.
    """
    with _loading(directory):
        dummy = load_format is LoadFormat.DUMMY
        return _load_model(directory, dtype, device, team, dummy, context_length, coding)


@contextmanager
def _loading(directory: Path) -> Iterator[None]:
    """What the model library or the system raises becomes one line that names the model; where it comes from
    is in the log, for those who read the level debug."""
    try:
        with reading(directory):
            yield
    except (StartupError, RankGroupBroken, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        log.debug("the model library failed", error=in_a_line(error), where=_where(frames))
        raise UnsupportedModel(
            f"the model {directory} cannot be served: the transformers library fails with it, in "
            f"{frames[-1].name}: {in_a_line(error)}"
        ) from error


def _heads_of(geometry: Geometry) -> str:
    return (
        f"{geometry.query_heads} query heads and {geometry.kv_heads} KV heads of {geometry.head_dim} numbers"
    )


def _where(frames: traceback.StackSummary) -> str:
    return " < ".join(f"{Path(each.filename).name}:{each.lineno}" for each in reversed(frames))


def _load_model(
    directory: Path,
    dtype: str,
    device: str,
    team: Team | None,
    dummy: bool,
    context_length: int,
    coding: WeightQuantization | None,
) -> Model:
    place = find_device(device, 0 if team is None else team.rank)
    library_logging.disable_progress_bar()
    how = quantisation_of(directory)
    missing = () if how is None else how.missing
    try:
        facts = read_model(directory, dummy=dummy, context_length=context_length)
    except UnsupportedModel as found:
        if found.needs:
            _refuse_all(directory, found, missing)
        raise
    config = _configuration(directory, facts.name)
    refuse_by_configuration(facts.name, config, missing)
    fix_rope_frequencies(facts.name, config, facts.context_length)
    if team is not None and team.topology.ranks > 1:
        share = find_rank_shard(facts.name, config, team)
        module = _load_share(directory, facts.name, config, share, dtype, place, how, dummy=dummy)
        return Model(module, facts, dtype, place, share)
    if not dummy and how is None:
        refuse_quantized_files(directory)
        # The files' own numbers have 2 to 4 bytes: what they take in memory is judged by the least it can be.
        # While codes are made, a weight's numbers and its codes, of a byte each, are both there.
        of_number = DTYPES[dtype].itemsize + (0 if coding is None else 1)
        _check_memory(directory, place, _file_bytes(directory) * of_number // 4)

    def load(*, ours: bool = True) -> Any:
        if dummy:
            return _load_dummies(directory, facts.name, config, dtype, place, ours=ours)
        if how is None:
            module = _load(directory, facts.name, config, DTYPES[dtype], maker_of(config), ours=ours)
        else:
            module = _load_quantised(directory, facts.name, config, dtype, place, how, ours=ours)
        return module.eval().requires_grad_(False)

    try:
        return _over_pages(load, facts, dtype, place, coding)
    except UnsupportedModel as refused:
        if coding is None:
            _let_frames_go(refused)
            with suppress(UnsupportedModel):
                return _by_row(load, facts, dtype, place)
        raise


def _refuse_all(directory: Path, found: UnsupportedModel, missing: Sequence[str]) -> None:
    """Raise UnsupportedModel with what was `found`, what is `missing`, and what the library's configuration
    shows."""
    name = own_name(directory)
    try:
        config = _configuration(directory, name)
    except UnsupportedModel:  # of a type that the library does not know
        raise found from None
    refuse_by_configuration(name, config, (*found.needs, *missing))


def _over_pages(
    load: Callable[..., Any],
    facts: ModelFacts,
    dtype: str,
    device: torch.device,
    coding: WeightQuantization | None,
) -> Model:
    """Of a definition that computes with our attention. Raises UnsupportedModel."""

    def recoded() -> Any:
        module = load()
        if coding is not None:
            code(facts.name, module, coding)
        return module.to(device)

    module = load()
    _check_logits(facts.name, module)
    codes = None if coding is None else code(facts.name, module, coding)
    kept = codes if coding is not None and coding.multiplied else None
    return Model(module.to(device), facts, dtype, device, load=recoded, codes=kept)


def _let_frames_go(error: BaseException) -> None:
    """What was loaded is held by frames that raised `error`: weights are not held twice."""
    raised: BaseException | None = error
    while raised is not None:
        traceback.clear_frames(raised.__traceback__)
        raised = raised.__cause__ or raised.__context__


def _by_row(load: Callable[..., Any], facts: ModelFacts, dtype: str, device: torch.device) -> Model:
    """Of a definition that has an attention of its own, or needs one. Raises UnsupportedModel."""
    model = Model(load(ours=False).to(device), facts, dtype, device, by_row=True)
    log.info("each row of a step is computed by itself, by the model library with its own attention")
    return model


def _configuration(directory: Path, name: str) -> Any:
    words = json_object(directory / CONFIG_FILE, required=True)
    if not words.get("model_type"):
        raise ModelUnreadable(f"{directory / CONFIG_FILE}: no model_type in it, which names its definition")
    try:
        if words.get("model_type") in ALIASES:
            known = canonical(words)
            config = AutoConfig.for_model(**known)
        else:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except (KeyError, ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        raise UnsupportedModel(
            f"the model {name} cannot be served: the transformers library does not know its configuration: "
            f"{_all_lines(error)}"
        ) from error
    for each in (config, config.get_text_config()):  # the library is given plain numbers
        vars(each).pop("quantization_config", None)
    return config


def _load_quantised(
    directory: Path,
    name: str,
    config: Any,
    dtype: str,
    device: torch.device,
    how: Quantisation,
    *,
    ours: bool,
) -> Any:
    bare = _bare(name, config, dtype, ours=ours)
    size = bytes_of(bare, {})
    _check_memory(directory, device, size)
    _tell_dequantised(directory, how, size)
    with _weights(directory, how, dtype) as weights:
        return _load(directory, name, bare.config, DTYPES[dtype], type(bare), weights.pending(), ours=ours)


@contextmanager
def _weights(directory: Path, how: Quantisation | None, dtype: str) -> Iterator[Files]:
    try:
        with weights_in(directory, how, DTYPES[dtype]) as weights:
            yield weights
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ModelUnreadable(f"{directory}: the weights cannot be loaded: {_first_line(error)}") from error


def _tell_dequantised(directory: Path, how: Quantisation, size: int) -> None:
    """`size`: bytes that the weights take here."""
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


def _load(
    directory: Path,
    name: str,
    config: Any,
    dtype: torch.dtype,
    maker: Any,
    pending: Mapping[str, Any] | None = None,
    *,
    ours: bool,
) -> Any:
    """`maker`: makes a definition of `config`: with `pending` the definition's own class. `pending`: the
    weights, where they are not what lies in the files of `directory`. `ours`: with our attention."""
    with load_report() as report:
        try:
            with joining_single_experts():
                module, told = maker.from_pretrained(
                    directory if pending is None else None,
                    state_dict=pending,
                    config=config,
                    dtype=dtype,
                    attn_implementation=attention_of(config, ours=ours),
                    trust_remote_code=False,
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are told, and refused below
                )
        except StartupError:  # what reads pending weights has said it
            raise
        except (KeyError, ValueError, TypeError, AttributeError, ImportError) as error:
            raise UnsupportedModel(
                f"the model {name} ({config.model_type}) cannot be served: {_why(error, 'load')}"
            ) from error
        except (OSError, RuntimeError, SafetensorError) as error:
            words = report.explain(_first_line(error))
            raise ModelUnreadable(f"{directory}: the weights cannot be loaded: {words}") from error
    for weight, found, wanted in sorted(told["mismatched_keys"], key=str):
        raise ModelUnreadable(
            f"{directory}: the weight {weight} has the shape {list(found)}, not {list(wanted)}"
        )
    missing = sorted(told["missing_keys"])
    if missing:
        raise ModelUnreadable(
            f"{directory}: the files lack {len(missing)} of the model's weights, {missing[0]} among them"
        )
    let_go(name, module)
    return module


def _load_dummies(
    directory: Path, name: str, config: Any, dtype: str, device: torch.device, *, ours: bool
) -> Any:
    module = _bare(name, config, dtype, ours=ours)
    _check_memory(directory, device, bytes_of(module, {}))
    fill(module, {}, plain_sources(DummyWeights(module, device)), device)
    return module.to(device).eval()


def _load_share(
    directory: Path,
    name: str,
    config: Any,
    share: RankShard,
    dtype: str,
    device: torch.device,
    how: Quantisation | None,
    *,
    dummy: bool,
) -> Any:
    module = _bare(name, config, dtype)
    _check_logits(name, module)
    with nullcontext() if dummy else _weights(directory, how, dtype) as files:
        sources = plain_sources(DummyWeights(module, device)) if files is None else files.sources(module)
        stage = partition_stages(name, module, share)
        cuts = partition_weights(name, module, share)
        size = bytes_of(module, cuts)
        _check_memory(directory, device, size)
        if how is not None and files is not None:
            _tell_dequantised(directory, how, size)
        fill(module, cuts, sources, device)
    module.to(device).eval()
    return stage


def _bare(name: str, config: Any, dtype: str, *, ours: bool = True) -> Any:
    try:
        module = empty_module(config, DTYPES[dtype], ours=ours)
    except (KeyError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise UnsupportedModel(
            f"the model {name} ({config.model_type}) cannot be served: {_why(error, 'make')}"
        ) from error
    let_go(name, module)
    return module


def _bytes_of_a_step(module: Any) -> int:
    """All weights, tied ones once, but of an embedding that is nothing else only single rows."""
    table, head = module.get_input_embeddings(), module.get_output_embeddings()
    read = [
        each
        for each in module.parameters()
        if head is None
        or each is head.weight
        or not isinstance(table, torch.nn.Embedding)
        or each is not table.weight
    ]
    return sum(each.numel() * each.element_size() for each in read)


def _check_logits(name: str, module: Any) -> None:
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise UnsupportedModel(
            f"the model {name} ({module.config.model_type}) cannot be served: its definition computes the "
            "logits of all positions at once"
        )


def _check_memory(directory: Path, device: torch.device, least: int) -> None:
    """Raise StartupError if the weights, which take `least` bytes at least, cannot fit."""
    short = memory_shortage(device, least)
    if short is not None:
        raise StartupError(f"the model {directory} takes at least {least} bytes on {device}, and {short}")


def _not_over_pages(name: str, config: Any, error: Exception) -> UnsupportedModel:
    return UnsupportedModel(
        f"the model {name} ({config.model_type}) cannot be served: its definition does not run over pages: "
        f"{_first_line(error)}{_unsaid(config, error)}"
    )


def _unsaid(config: Any, error: Exception) -> str:
    """The setting for want of which a definition failed: the library's own words name none."""
    if getattr(config, "pad_token_id", None) is not None or "NoneType" not in str(error):
        return ""
    return "; its config.json has no pad_token_id, by which its definition finds positions: write one in"


def _why(error: Exception, act: str) -> str:
    """Why the library cannot `act`, "load" or "make", a model. A definition that knows no attentions but its
    own looks ours up among them by name."""
    cannot = f"the transformers library cannot {act} it"
    if error.args == (NAME,):
        return f"{cannot} with an attention of ours: its definition takes none"
    if isinstance(error, KeyError):
        return f"{cannot}: its config.json names {_first_line(error)}, which the library does not have"
    return f"{cannot}: {_first_line(error)}"


def _all_lines(error: Exception) -> str:
    """The library's checks of a configuration name the value behind their first line."""
    text = " ".join(str(error).split())
    return text if len(text) <= LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]}…"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
