"""Tests that mapped weights are what the library makes of the same files, and that no more is read."""

from collections.abc import Callable, Collection
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import conversion_mapping
from transformers import core_model_loading as library

from baton.engine.loading import weight_mapping
from baton.engine.loading.model_loading import load_model
from baton.engine.loading.weight_files import WeightFiles
from baton.engine.loading.weight_mapping import WALKS, Box, Cut, read_source, sources_of
from baton.inference.collectives import LocalCollectives
from baton.models.model_facts import ModelUnreadable, UnsupportedModel
from baton.topology import Topology
from tests.engine import tiny_models
from tests.engine.quantization.quantized_files import FORMATS, MXFP4, PT, write

REFUSED: Final = {
    "Conv3dToLinear",
    "ErnieFuseAndSplitTextVisionExperts",
    "Inkling2LoopDequantizeExperts",
    "Inkling2LoopMergeMessageQueries",
    "Inkling2UnpadVocab",
    "PermuteForRope",
    "VisionFuseAndPermuteForRope",
    "VisionUnfuseAndPermuteForRope",
}
"""Operations of the library that no served model needs. Any that is neither here nor supported is new."""
EXPERTS: Final[dict[str, Any]] = {
    **tiny_models.SHAPE,
    "num_attention_heads": 4,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
MIXTURE: Final = transformers.Qwen3MoeConfig(**EXPERTS)
DEALT_OUT: Final = transformers.GptOssConfig(
    **{**EXPERTS, "hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "sliding_window": 8}
)
CORRECTED: Final = transformers.Glm4MoeConfig(
    **EXPERTS, n_routed_experts=4, n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1
)
"""GLM-4.5's configuration, whose routers are in float32."""


def merged(first: int = 0, second: int = 1) -> library.WeightConverter:
    return library.WeightConverter(
        ["experts.*.gate.weight", "experts.*.up.weight"],
        "experts.both",
        [library.MergeModulelist(first), library.Concatenate(second)],
    )


def one(source: str, target: str, *operations: Any) -> library.WeightConverter:
    return library.WeightConverter(source, target, list(operations))


Case = tuple[library.WeightConverter, dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]
CASES: Final[dict[str, Case]] = {
    "experts, each of two": (
        merged(),
        {f"a.experts.{expert}.{name}.weight": (4, 6) for expert in range(11) for name in ("gate", "up")},
        {"a.experts.both": (11, 8, 6)},
    ),
    "experts of one": (
        one("experts.*.down.weight", "experts.down", library.MergeModulelist(0)),
        {f"a.experts.{expert}.down.weight": (4, 6) for expert in range(3)},
        {"a.experts.down": (3, 4, 6)},
    ),
    "one behind the other": (
        library.WeightConverter(["q.weight", "k.weight"], "qk.weight", [library.Concatenate(0)]),
        {"a.q.weight": (5, 6), "a.k.weight": (3, 6)},
        {"a.qk.weight": (8, 6)},
    ),
    "chunks": (
        library.WeightConverter("w.weight", ["x.weight", "y.weight", "z.weight"], [library.Chunk(1)]),
        {"a.w.weight": (2, 9)},
        {f"a.{name}.weight": (2, 3) for name in "xyz"},
    ),
    "parts of other sizes": (
        library.WeightConverter("w.weight", ["x.weight", "y.weight"], [library.Split(0)]),
        {"a.w.weight": (7, 4)},
        {"a.x.weight": (5, 4), "a.y.weight": (2, 4)},
    ),
    "turned": (
        one("w.weight", "x", library.Transpose(1, 2)),
        {"a.w.weight": (3, 4, 6)},
        {"a.x": (3, 6, 4)},
    ),
    "turned where it is to be": (
        one("w.weight", "x", library.Transpose(0, 1, check_dims=True)),
        {"a.w.weight": (6, 4)},
        {"a.x": (6, 4)},
    ),
    "even places, then odd ones, and those apart": (
        library.WeightConverter("w.weight", ["x", "y"], [library.Interleave(0), library.Chunk(0)]),
        {"a.w.weight": (8, 4)},
        {"a.x": (4, 4), "a.y": (4, 4)},
    ),
}


class Held:
    """Weights in memory that count the numbers read."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        numbers = torch.Generator().manual_seed(5)
        self.tensors = {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}
        self.read_numbers = 0

    @property
    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, box: Box) -> torch.Tensor:
        part = self.tensors[name][tuple(slice(each.start, each.stop) for each in box)]
        self.read_numbers += part.numel()
        return part


class Definition(nn.Module):
    """A module that has parameters only."""

    base_model_prefix = ""
    config = None

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for path, shape in shapes.items():
            holder, parts = self, path.split(".")
            for part in parts[:-1]:
                if not hasattr(holder, part):
                    holder.add_module(part, nn.Module())
                holder = getattr(holder, part)
            holder.register_parameter(parts[-1], nn.Parameter(torch.empty(shape, device="meta")))


def by_the_library(converter: Any, weights: Held, module: nn.Module) -> dict[str, torch.Tensor]:
    converter, target = deepcopy(converter), ""
    for name in sorted(weights.names, key=library.dot_natural_key):
        target, pattern = converter.rename_source_key(name)
        converter.add_tensor(target, name, pattern, weights.tensors[name])
    made: dict[str, Any] = converter.convert(target, model=module, config=None)
    return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


def cuts_of(shape: tuple[int, ...]) -> list[Cut]:
    """Return parts of each dimension: a beginning, an end, and two pieces."""
    return [
        Cut(dim, ranges)
        for dim, size in enumerate(shape)
        for ranges in (
            (range(size // 2),),
            (range(size // 2, size),),
            (range(size // 3), range(size // 2, size - 1)),
        )
    ]


@pytest.mark.parametrize("case", CASES)
def test_what_is_joined_is_what_the_library_joins_and_a_part_of_it_is_read_alone(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter, stored, wanted = CASES[case]
    module, weights = Definition(wanted), Held(stored)
    expected = by_the_library(converter, weights, module)
    assert {name: tuple(each.shape) for name, each in expected.items()} == wanted
    monkeypatch.setattr(weight_mapping, "get_model_conversion_mapping", lambda _: [converter])
    made = sources_of(module, weights)
    assert made.keys() == wanted.keys()
    for name, source in made.items():
        assert source.shape == wanted[name]
        assert torch.equal(read_source(source, None, torch.float32, torch.device("cpu")), expected[name])
        for cut in cuts_of(source.shape):
            parts = [expected[name].narrow(cut.dim, each.start, len(each)) for each in cut.ranges]
            weights.read_numbers = 0
            found = read_source(source, cut, torch.float32, torch.device("cpu"))
            assert torch.equal(found, torch.cat(parts, cut.dim)), cut
            apart = any(isinstance(each, library.Interleave) for each in converter.operations)
            assert weights.read_numbers <= found.numel() * (2 if apart else 1), cut


def test_every_operation_of_the_library_is_walked_or_known_to_be_refused() -> None:
    """A new operation of the library fails this test."""
    transforms = [
        each for some in conversion_mapping._build_checkpoint_conversion_mapping().values() for each in some
    ]
    converters = [each for each in transforms if isinstance(each, library.WeightConverter)]
    assert all(isinstance(each, library.WeightRenaming | library.WeightConverter) for each in transforms)
    used = {type(operation).__name__ for each in converters for operation in each.operations}
    walked = {each.__name__ for each in WALKS}
    assert used - walked - REFUSED == set()
    assert walked.isdisjoint(REFUSED)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(MIXTURE, tmp_path_factory.mktemp("mixture") / "plain")


def half_of(directory: Path, rank: int = 0, topology: Topology = Topology(2)) -> Any:  # noqa: B008
    return load_model(directory, "float32", "cpu", LocalCollectives(topology, rank))


def test_a_model_that_needs_an_operation_which_is_not_walked_is_refused_by_its_name(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_mapping, "WALKS", {})
    with pytest.raises(
        UnsupportedModel, match=r"several ranks: it needs weights that the library makes by MergeModulelist"
    ):
        half_of(mixture)


Change = Callable[[str, torch.Tensor], torch.Tensor | None]
OF_AN_EXPERT: Final = "layers.1.mlp.experts.2.up_proj.weight"
CHANGES: Final[dict[str, tuple[Change, str]]] = {
    "lost": (
        lambda name, each: None if ".layers.1.mlp.experts.3." in name else each,
        r"the weight model\.layers\.1\.mlp\.experts\.\w+ has the shape \[3, .*\], not \[4, ",
    ),
    "all lost": (
        lambda name, each: None if ".layers.1.mlp.experts." in name else each,
        r"the files lack the model's weight model\.layers\.1\.mlp\.experts\.",
    ),
    "narrow": (
        lambda name, each: each[:8] if name.endswith(OF_AN_EXPERT) else each,
        rf"the weight model\.{OF_AN_EXPERT} has another shape than those that it is joined with",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_experts_that_do_not_fit_are_named(mixture: Path, tmp_path: Path, change: str) -> None:
    changed, words = CHANGES[change]
    file, here = "model.safetensors", tmp_path
    (here / "config.json").write_bytes((mixture / "config.json").read_bytes())
    tensors = {name: changed(name, each) for name, each in load_file(mixture / file).items()}
    save_file(
        {name: each.contiguous() for name, each in tensors.items() if each is not None}, here / file, PT
    )
    with pytest.raises(ModelUnreadable, match=rf"{here}: {words}"):
        half_of(here)


@pytest.fixture
def read_numbers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers read, by read."""
    read, counted = WeightFiles.read, []

    def counting(self: WeightFiles, name: str, box: Box) -> torch.Tensor:
        part = read(self, name, box)
        counted.append(part.numel())
        return part

    monkeypatch.setattr(WeightFiles, "read", counting)
    return counted


@pytest.mark.parametrize("form", [None, "FP8 in blocks (Qwen3-FP8, DeepSeek V3, MiniMax M2)", "AWQ"])
@pytest.mark.parametrize("topology", [Topology(2), Topology(1, 3)], ids=["tp2", "pp3"])
def test_a_rank_reads_what_it_holds_and_no_more(
    mixture: Path, tmp_path: Path, read_numbers: list[int], form: str | None, topology: Topology
) -> None:
    directory = mixture if form is None else write(mixture, tmp_path, FORMATS[form])[0]
    for rank in range(topology.ranks):
        read_numbers.clear()
        weights = half_of(directory, rank, topology).module.state_dict()
        held = sum(each.numel() for each in weights.values())
        assert sum(read_numbers) == held
        experts = sum(each.numel() for name, each in weights.items() if ".experts." in name)
        assert experts * topology.ranks == 3 * 4 * 3 * 32 * tiny_models.SHAPE["hidden_size"]


def test_a_rank_that_has_some_of_the_experts_reads_those(tmp_path: Path, read_numbers: list[int]) -> None:
    """gpt-oss, in MXFP4."""
    quantised, _ = write(tiny_models.save(DEALT_OUT, tmp_path / "plain"), tmp_path, MXFP4)
    for rank in range(2):
        read_numbers.clear()
        weights = half_of(quantised, rank).module.state_dict()
        assert sum(read_numbers) == sum(each.numel() for each in weights.values())
        assert {len(each) for name, each in weights.items() if ".experts." in name} == {2}


@pytest.mark.parametrize("topology", [Topology(1), Topology(2)], ids=["one", "two"])
def test_what_is_computed_in_float32_beside_a_narrow_model_is_so_on_every_rank(
    tmp_path: Path, topology: Topology
) -> None:
    directory = tiny_models.save(CORRECTED, tmp_path / "corrected")
    for rank in range(topology.ranks):
        weights = load_model(
            directory, "bfloat16", "cpu", LocalCollectives(topology, rank)
        ).module.state_dict()
        wide = {name for name, each in weights.items() if each.dtype == torch.float32}
        routers = (f"model.layers.{layer}.mlp.gate." for layer in (1, 2))
        assert wide == {router + own for router in routers for own in ("weight", "e_score_correction_bias")}


@pytest.mark.parametrize("ranks", [Topology(), Topology(2)], ids=str)
def test_a_layer_that_predicts_several_tokens_is_ignored_as_the_library_ignores_it(
    tmp_path: Path, ranks: Topology
) -> None:
    """Releases of DeepSeek V3 have its weights after those of the last layer, expert by expert."""
    directory = tiny_models.save(tiny_models.ARCHITECTURES["deepseek-v3-latents"], tmp_path / "plain")
    plain = load_model(directory, "float32", "cpu", LocalCollectives(ranks, 0)).weights()
    file = directory / "model.safetensors"
    weights = load_file(file)
    predictor = {
        name.replace(".layers.2.", ".layers.3."): torch.full_like(weight, torch.nan)
        for name, weight in weights.items()
        if ".layers.2." in name
    }
    assert "model.layers.3.mlp.experts.7.down_proj.weight" in predictor
    predictor["model.layers.3.eh_proj.weight"] = torch.full((48, 96), torch.nan)
    save_file(weights | predictor, file, PT)
    loaded = load_model(directory, "float32", "cpu", LocalCollectives(ranks, 0)).weights()
    assert all(map(torch.equal, loaded, plain))
    assert len(loaded) == len(plain)
