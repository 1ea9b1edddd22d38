"""Tests of workers of several ranks, with all shapes of the two sides: output is the reference library's.

Real processes, float32, 16 requests at a time of which some hang up in mid-stream, greedy output token for
token; then tokens and their log-probabilities, as one engine alone draws them. Afterwards every gauge of
every rank is back where it was. `make test-all` has each value that a shape is made of, with pages and
checksums in turns, `make verify-groups` every shape.
"""

import re
from collections.abc import Iterator, Sequence, Set
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any, Final

import pytest
from transformers import AutoTokenizer

from baton.engine.loading.engine_loading import load_engine
from baton.rooms.request import Sampling, Token
from tests.engine.ranks.rank_scenarios import drawn
from tests.http import web
from tests.models.eight_heads import VOCABULARY, eight_heads, latents
from tests.pairwise import Case, cover, every
from tests.process.load import Asked, Load, Pair, any_prompts, asked
from tests.process.stack import SPLIT, Stack, running_stack

OUTPUT_TOKENS = 12
CHUNK_TOKENS = 64
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 130, 200, 500)
[DRAWN_FROM] = any_prompts([150], VOCABULARY, seed=3)
SAMPLINGS: Final[list[dict[str, Any]]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 11, "top_p": 0.95, "top_k": 50},
]
TOP = 3
LOGPROB_ERROR = 1e-3
PAIR: Final[set[Pair]] = {("prefill-0", "decode-0")}
STEADY = {"lease_ms": "20000"}
PATIENT = {"connect_timeout_ms": "60000", **SPLIT}
"""Settings for many processes on a few cores, where a room given up for slowness would be a failure."""

TEXTS = (
    "Hello",
    "The capital of France is",
    "1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n: int) -> int:\n    a, b = 0, 1\n",
    "Привет, как дела? Сегодня",
    "今日はとても良い天気ですね。",
    "🎉🎈🥳 Party time! 🚀🌙",
    "Q: What is 12 times 12?\nA:",
    "The old lighthouse keeper climbed the stairs every evening, counting each step under his breath. " * 20,
)

ONE, A_HEAD_EACH, COPIES = "one", "a head each", "copies"
TENSOR: Final = {
    "small": {ONE: 1, A_HEAD_EACH: 2, COPIES: 4},
    "demo": {ONE: 1, A_HEAD_EACH: 3},
    "latent": {ONE: 1, COPIES: 2},
}
"""Tensor ranks, by how many of the model's KV heads each of them holds."""
RANKS_MAX: Final = 9
"""Most ranks of a worker, because each takes memory."""
SHAPES: Final[dict[str, Sequence[Any]]] = {
    "model": ("small", "demo", "latent"),
    "prefill": (ONE, A_HEAD_EACH, COPIES),
    "stages": (1, 2, 3),
    "decode": (ONE, A_HEAD_EACH, COPIES),
}
WAYS: Final[dict[str, Sequence[Any]]] = {
    "pages": (("16", "16"), ("16", "32"), ("32", "16")),
    "checksum": ("off", "pages"),
}


def ranks(case: Case) -> int:
    """Ranks of the prefill worker."""
    stages: int = case["stages"]
    return TENSOR[case["model"]][case["prefill"]] * stages


def possible(case: Case) -> bool:
    return {case["prefill"], case["decode"]} <= TENSOR[case["model"]].keys() and ranks(case) <= RANKS_MAX


def processes(case: Case) -> int:
    return 1 + ranks(case) + TENSOR[case["model"]][case["decode"]]


def cost(case: Case) -> float:
    """Seconds of a case, about. The demo model's many layers take each process three times as long."""
    return processes(case) * (3 if case["model"] == "demo" else 1)


def shape(case: Case) -> Case:
    return {each: case[each] for each in SHAPES}


def named(case: Case) -> str:
    tensor = TENSOR[case["model"]]
    return (
        f"{case['model']}-tp{tensor[case['prefill']]}-pp{case['stages']}-into-tp{tensor[case['decode']]}"
        f"-pages-{'-'.join(case['pages'])}-checksum-{case['checksum']}"
    )


def by_every_way(shapes: Sequence[Case]) -> list[Case]:
    """Return each shape of ranks with one combination of page sizes and checksum mode, in turn."""
    return [each | way for each, way in zip(shapes, cycle(every(WAYS)), strict=False)]


FEW: Final = by_every_way(cover(every(SHAPES, possible), cost, size=1))
OTHERS: Final = [each for each in by_every_way(every(SHAPES, possible)) if shape(each) not in map(shape, FEW)]


@pytest.fixture(scope="session")
def models(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model has 9 heads, 3 KV heads and 30 layers; the small one 8, 2 and 4. The third has 4 heads,
    which share one latent."""
    return {
        "latent": latents(tmp_path_factory.mktemp("latents"), demo_model_dir),
        "small": eight_heads(tmp_path_factory.mktemp("eight-heads"), demo_model_dir),
        "demo": demo_model_dir,
    }


def small_asked(directory: Path) -> Asked:
    return asked(directory, any_prompts(LENGTHS, VOCABULARY), OUTPUT_TOKENS)


@pytest.fixture
def known(case: Case, models: dict[str, Path]) -> Asked:
    directory = models[case["model"]]
    if case["model"] != "demo":
        return small_asked(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompts = [list(tokenizer(text)["input_ids"]) for text in TEXTS]
    return asked(directory, [[504], *prompts], OUTPUT_TOKENS)


@pytest.fixture
def stack(case: Case, models: dict[str, Path]) -> Iterator[Stack]:
    """A stack of one worker on each side."""
    tensor, pages = TENSOR[case["model"]], case["pages"]
    with running_stack(
        str(models[case["model"]]),
        prefill=[
            {
                "tp": str(tensor[case["prefill"]]),
                "pp": str(case["stages"]),
                "page_tokens": pages[0],
                "chunk_tokens": str(CHUNK_TOKENS),
            }
        ],
        decode=[{"tp": str(tensor[case["decode"]]), "page_tokens": pages[1], **PATIENT}],
        bootstrap=STEADY,
        dtype="float32",
        kv_checksum=case["checksum"],
        kv_cache_memory="64MiB" if case["model"] == "demo" else "8MiB",
    ) as stack:
        yield stack


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(each, id=named(each)) for each in FEW),
        *(pytest.param(each, id=named(each), marks=pytest.mark.all_groups) for each in OTHERS),
    ],
)
async def test_what_is_served_equals_the_reference_whatever_the_shapes(
    stack: Stack, known: Asked, case: Case
) -> None:
    start = stack.idle_gauges()
    load = Load(stack, known)
    await load.rounds_until(PAIR, rounds_min=1)
    assert load.hung_up > 0
    check_draws(stack)
    check_choices(stack)
    if case["model"] == "demo":
        check_held(stack)
    stack.wait_idle(start)
    if case["checksum"] == "pages":
        assert summed(stack) >= PAIR


def check_draws(stack: Stack) -> None:
    """Check that ids, and logprobs apart from rounding, are those of one engine alone."""
    model = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": DRAWN_FROM, "ignore_eos": True, "return_token_ids": True}
    body |= {"logprobs": TOP, "max_tokens": OUTPUT_TOKENS}
    for sampling, expected in zip(SAMPLINGS, drawn_alone(Path(stack.model)), strict=True):
        reply = web().post(f"{stack.url}/v1/completions", json=body | sampling, timeout=60)
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        assert choice["token_ids"] == [token.id for token in expected]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(
            [token.logprob for token in expected], abs=LOGPROB_ERROR
        )


def check_choices(stack: Stack) -> None:
    """Check that three choices of one prompt equal the answers to three requests."""
    model = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": DRAWN_FROM, "ignore_eos": True, "return_token_ids": True}
    body |= {"temperature": 0.9, "max_tokens": OUTPUT_TOKENS}

    def ask(**more: int) -> list[list[int]]:
        reply = web().post(f"{stack.url}/v1/completions", json=body | more, timeout=60)
        assert reply.status_code == 200, reply.text
        return [choice["token_ids"] for choice in reply.json()["choices"]]

    assert ask(n=3, seed=11) == [ask(seed=seed)[0] for seed in (11, 12, 13)]


def check_held(stack: Stack) -> None:
    """Check that the sampling rank constrains an answer by its grammar, and that the others have no grammar
    state."""
    model = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": DRAWN_FROM, "max_tokens": OUTPUT_TOKENS, "regex": "[a-f]{5}-[0-9]{5}"}
    reply = web().post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    assert re.fullmatch("[a-f]{5}-[0-9]{5}", choice["text"])
    assert choice["finish_reason"] == "stop"


@cache
def drawn_alone(model: Path) -> list[list[Token]]:
    """Return the tokens drawn by each sampling, computed in this process."""
    engine = load_engine(model, dtype="float32", device="cpu", kv_cache_memory=2**26, threads=1)
    samplings = [Sampling(**each, top_logprobs=TOP) for each in SAMPLINGS]
    return drawn(engine, [DRAWN_FROM] * len(samplings), samplings, OUTPUT_TOKENS)


@pytest.fixture
def several(models: dict[str, Path]) -> Iterator[Stack]:
    """A stack of two workers on each side with different ranks and page sizes, so that each pair of them
    divides pages differently."""
    with running_stack(
        str(models["small"]),
        prefill=[
            {"tp": "2", "pp": "2", "page_tokens": "16", "chunk_tokens": str(CHUNK_TOKENS)},
            {"page_tokens": "32", "chunk_tokens": str(CHUNK_TOKENS)},
        ],
        decode=[
            {"page_tokens": "16", "kv_cache_memory": "8MiB", **PATIENT},
            {"tp": "4", "page_tokens": "32", "kv_cache_memory": "6MiB", **PATIENT},
        ],
        bootstrap=STEADY,
        dtype="float32",
        kv_checksum="pages",
        kv_cache_memory="8MiB",
    ) as stack:
        yield stack


@pytest.mark.timeout(600)
async def test_each_of_several_workers_of_differing_shapes_serves_each_of_the_others(
    several: Stack, models: dict[str, Path]
) -> None:
    start = several.idle_gauges()
    pairs = set(product(("prefill-0", "prefill-1"), ("decode-0", "decode-1")))
    load = Load(several, small_asked(models["small"]))
    await load.rounds_until(pairs, rounds_min=2)
    several.wait_idle(start)
    assert pairs <= summed(several)


def summed(stack: Stack) -> Set[Pair]:
    """Return the workers that served rooms of whole answers. All pages that landed of these were compared."""
    rooms = web().get(f"{stack.url}/rooms", params={"limit": 1000}, timeout=10).json()["rooms"]
    answered = {(room["prefill"], room["decode"]): room["id"] for room in rooms if room["cause"] is None}
    for room in answered.values():
        events = web().get(f"{stack.url}/rooms/{room}", timeout=10).json()["events"]
        landed = [each["detail"] for each in events if each["name"] == "landed"]
        assert landed, room
        assert all(each.endswith("contents as computed") for each in landed), room
    return answered.keys()


def test_what_make_test_all_has_and_verify_groups_adds_is_every_shape() -> None:
    assert [each for each in every(SHAPES, possible) if each not in map(shape, [*FEW, *OTHERS])] == []
    assert len(FEW) < len(OTHERS)
