"""Tests that a draft model drafts what it would draw, within its memory, and changes no answer."""

import json
import logging
import re
import shutil
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest
from transformers import LlamaConfig

from baton.decode.settings import DecodeSettings
from baton.engine.engine_startup import start_engine
from baton.engine.loading.draft_files import check_vocabulary
from baton.engine.loading.engine_loading import load_engine
from baton.engine.torch_engine import TorchEngine
from baton.engine_interface import EngineLost, Proposal, Row, RowResult, Sequence
from baton.rooms.request import Grammar, Request, Sampling, Token
from baton.runtime.errors import StartupError
from baton.sampling.draft_model import AT_ONCE, BEHIND, FAILURES_MAX, DraftModel, DraftRequest
from baton.sampling.proposer import output_after
from tests.api import tiny as tokenizers
from tests.engine.test_continuation import SAMPLINGS
from tests.engine.test_equals_reference import random_prompts
from tests.engine.tiny_models import SHAPE, save
from tests.grammars.answers import NAMED
from tests.inference.engine_worker import GREEDY, ShuffledWorker, Tenant
from tests.sampling.test_grammar_masks import DIGITS, OBJECT, VOCABULARY, WARM, admitted

MAIN, SMALLER = "llama-gqa-untied", "llama-mha-tied"
TOKENS, AHEAD = 30, 4
LENGTHS = (1, 15, 30, 47)
CODED = LlamaConfig(
    **{**SHAPE, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}
)
"""Configuration of a model whose weights fit into blocks of codes."""

Load = Callable[..., TorchEngine]


@pytest.fixture
def loaded(tiny_dir: Callable[[str], Path]) -> Load:
    """Return a function that loads an engine of its own, with pages that hold NaN."""

    def load(name: str, pages: int = 64) -> TorchEngine:
        memory = 3 * 6 * 2 * 16 * 16 * 4 * pages  # of the model of most KV heads
        engine = load_engine(tiny_dir(name), dtype="float32", device="cpu", kv_cache_memory=memory, threads=1)
        engine.cache.tensor.fill_(float("nan"))
        return engine

    return load


@dataclass
class Watched:
    """An engine of drafts, of which each step is looked at."""

    engine: TorchEngine
    rows_of: abc.MutableSequence[list[Row]]
    look: Callable[[], None] = lambda: None
    released: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout, self.caches = self.engine.layout, self.engine.caches
        self.context_length, self.vocab_size = self.engine.context_length, self.engine.vocab_size

    def step(self, rows: abc.Sequence[Row]) -> abc.Sequence[RowResult]:
        self.rows_of.append([*rows])
        self.look()
        return self.engine.step(rows)

    def release(self, sequence: Sequence) -> None:
        self.released.append(sequence)
        self.engine.release(sequence)


def asking(worker: ShuffledWorker, prompt: abc.Sequence[int], sampling: Sampling = GREEDY) -> Tenant:
    tenant = worker.admit(prompt, TOKENS, sampling)
    tenant.sequence.proposal = Proposal(wanted=AHEAD)
    return tenant


def proposed(tenant: Tenant) -> list[int]:
    assert tenant.sequence.proposal is not None
    return [*tenant.sequence.proposal.tokens]


def drawn_alone(worker: ShuffledWorker, asked: Request, output: abc.Sequence[int], count: int) -> list[int]:
    """Return what the worker's model alone draws behind `output`."""
    tenant = Tenant(Sequence(replace(asked, max_tokens=len(output) + count), [*output]))
    while not tenant.done:
        worker.step([tenant], 100)
    worker.release(tenant)
    return tenant.sequence.output[len(output) :]


def test_what_is_drafted_is_what_the_model_alone_would_draw_behind_what_was_drawn(loaded: Load) -> None:
    """Whatever was taken of its last drafts, also where it was not asked meanwhile: with penalties, seeds and
    biases, all in the same steps. The answers are those without drafts."""
    engine = loaded(MAIN)
    plain = ShuffledWorker(engine)
    prompts = [random_prompts(LENGTHS)[place % len(LENGTHS)] for place in range(len(SAMPLINGS))]
    asked = [*zip(prompts, SAMPLINGS.values(), strict=True)]
    expected = plain.run([plain.admit(prompt, TOKENS, sampling) for prompt, sampling in asked], 100)
    smaller, alone = DraftModel(loaded(SMALLER, 256), engine.vocab_size), ShuffledWorker(loaded(SMALLER))
    engine.draft_with(smaller)
    worker = ShuffledWorker(engine)
    tenants = [asking(worker, *each) for each in asked]
    drafted = 0
    for step in count():
        if all(tenant.done for tenant in tenants):
            break
        for number, tenant in enumerate(tenants):
            assert tenant.sequence.proposal is not None
            tenant.sequence.proposal.wanted = AHEAD if (step + number) % 3 else 0
        worker.guess(tenants, 100, proposed)
        for tenant in tenants:
            tokens, output = proposed(tenant), tenant.sequence.output
            if not tenant.done and tokens:
                drafted += len(tokens)
                wanted = min(AHEAD, TOKENS - len(output))
                assert tokens == drawn_alone(alone, tenant.sequence.request, output, wanted)
    assert [tenant.sequence.output for tenant in tenants] == expected
    assert drafted > 2 * TOKENS


@pytest.mark.parametrize("ahead", [1, AHEAD])
def test_a_model_that_is_the_same_drafts_what_is_drawn(loaded: Load, ahead: int) -> None:
    """A draft model that is the main model drafts the same tokens, with the same seeds and positions, also at
    a temperature."""
    engine = loaded(MAIN)
    engine.draft_with(DraftModel(loaded(MAIN, 256), engine.vocab_size))
    worker = ShuffledWorker(engine)
    prompt = random_prompts((20,))[0]
    tenants = [asking(worker, prompt, sampling) for sampling in SAMPLINGS.values()]
    for tenant in tenants:
        assert tenant.sequence.proposal is not None
        tenant.sequence.proposal.wanted = ahead
    steps = 0
    while not all(tenant.done for tenant in tenants):
        going = [tenant for tenant in tenants if not tenant.done]
        checked = [proposed(tenant) for tenant in going]
        taken = worker.guess(going, 100, proposed)
        for tenant, tokens, drafts in zip(going, taken, checked, strict=True):
            assert tenant.done or [token.id for token in tokens][:-1] == drafts
        steps += 1
        told = [each.sequence.proposal for each in going if each.sequence.proposal and not each.done]
        assert all(each.spent_us >= each.draft_us > 0 for each in told)
    assert steps <= 2 + TOKENS // (1 + ahead)


@pytest.mark.parametrize("grammar", [DIGITS, OBJECT, NAMED], ids=["regex", "schema", "names"])
def test_drafts_are_held_to_their_sequences_grammar(tmp_path: Path, grammar: Grammar) -> None:
    """So a draft model that is the main model is always right under a grammar, too."""
    shape = {**SHAPE, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
    directory = save(LlamaConfig(**shape), tmp_path)
    engine, beside = (
        load_engine(directory, dtype="float32", device="cpu", kv_cache_memory=2**22, threads=1)
        for _ in range(2)
    )
    worker = ShuffledWorker(engine)
    (expected,) = worker.run([admitted(worker, grammar, WARM)], 100)
    engine.draft_with(DraftModel(beside, VOCABULARY))
    tenant = admitted(worker, grammar, WARM)
    tenant.sequence.proposal = Proposal(wanted=AHEAD)
    steps = drafted = 0
    while not tenant.done:
        checked = proposed(tenant)
        (taken,) = worker.guess([tenant], 100, proposed)
        assert tenant.done or [token.id for token in taken][:-1] == checked
        steps += 1
        drafted += len(checked)
    assert tenant.sequence.output == expected
    assert drafted
    assert steps < len(expected)


def test_who_is_far_behind_catches_up_in_bounded_parts_and_has_no_drafts_until_then(loaded: Load) -> None:
    watched = Watched(loaded(SMALLER), [])
    engine = loaded(MAIN)
    engine.draft_with(DraftModel(watched, watched.vocab_size))
    worker, alone = ShuffledWorker(engine), ShuffledWorker(loaded(SMALLER))
    long, longer = (asking(worker, prompt) for prompt in random_prompts((150, 200)))
    first: dict[int, int] = {}
    for step in range(9):
        before = len(watched.rows_of)
        worker.guess([long, longer], 400, proposed)
        behind = [row for rows in watched.rows_of[before:] for row in rows if row.stop - row.start > AT_ONCE]
        assert sum(row.stop - row.start for row in behind) <= BEHIND
        for number, each in enumerate((long, longer)):
            if proposed(each):
                first.setdefault(number, step)
                output = each.sequence.output
                assert proposed(each) == drawn_alone(alone, each.sequence.request, output, AHEAD)
    assert first == {0: 2, 1: 5}, "one after the other"


def wish(name: str, tokens: int, proposal: Proposal | None = None, count: int = AHEAD) -> DraftRequest:
    """Return a request to draft behind a prompt and one output token."""
    prompt = random_prompts((tokens,))[0]
    request = Request(name, tuple(prompt), TOKENS, sampling=GREEDY)
    return DraftRequest(Sequence(request, []), proposal or Proposal(wanted=count), (7,), count)


def again(request: DraftRequest, *output: int) -> DraftRequest:
    """Return the request of the same sequence behind another output."""
    return DraftRequest(request.sequence, request.proposal, output, request.most)


def taken_pages(model: DraftModel) -> int:
    census = model.census()
    return census["taken"]


def test_where_pages_lack_who_drafted_least_lately_gives_them_and_nobody_of_the_same_step(
    loaded: Load,
) -> None:
    """Each sequence takes two of four pages. One that gave its pages up computes all anew and drafts the
    same."""
    engine = loaded(SMALLER, 4)
    assert engine.cache.pages == 4
    model = DraftModel(engine, engine.vocab_size)
    first, second, third = (wish(name, 20 + place) for place, name in enumerate("abc"))
    told = {each: model.propose([each])[0][0] for each in (first, second, third)}
    assert all(len(tokens) == AHEAD for tokens in told.values())
    assert taken_pages(model) == 4
    assert model.propose([first])[0] == [told[first]]
    together, _ = model.propose([second, third, first])
    assert sorted(map(len, together)) == [0, AHEAD, AHEAD], "one has no pages"
    for each, tokens in zip((second, third, first), together, strict=True):
        assert tokens in ([], told[each])
    assert model.census() == {"taken": 4, "free": 0}


def test_zero_at_idle_who_is_over_has_no_pages_also_where_it_ends_while_drafts_are_computed(
    loaded: Load,
) -> None:
    watched = Watched(loaded(SMALLER), [])
    model = DraftModel(watched, watched.vocab_size)
    one, other = wish("one", 20), wish("other", 40)
    model.propose([one, other])
    assert taken_pages(model) == 2 + 3
    model.release(one.proposal)
    assert taken_pages(model) == 3
    assert model.propose([one])[0] == [[]], "it is late"
    held: list[int] = []

    def end() -> None:
        model.release(other.proposal)
        held.append(taken_pages(model))

    watched.look = end
    model.propose([again(other, 7, 8)])
    assert held[0] == 3, "nobody else has them while something is computed"
    assert taken_pages(model) == 0


def test_a_step_does_not_fail_for_its_drafts(loaded: Load) -> None:
    watched = Watched(loaded(SMALLER), [])
    engine = loaded(MAIN)
    worker = ShuffledWorker(engine)
    (prompt,) = random_prompts((20,))
    (expected,) = worker.run([worker.admit(prompt, TOKENS)], 100)
    model = DraftModel(watched, watched.vocab_size)
    engine.draft_with(model)
    tenant = asking(worker, prompt)

    def fail() -> None:
        raise RuntimeError("as a library may")

    watched.look = fail
    while not tenant.done:
        worker.guess([tenant], 100, proposed)
        assert proposed(tenant) == []
    assert tenant.sequence.output == expected
    assert taken_pages(model) == 0
    assert len(watched.rows_of) == FAILURES_MAX, "then it is given up"

    def lose() -> None:
        raise EngineLost("the device is gone")

    watched.look = lose
    engine.draft_with(DraftModel(watched, watched.vocab_size))
    with pytest.raises(EngineLost):
        worker.guess([asking(worker, prompt)], 100, proposed)


def test_a_step_for_which_nothing_is_computed_says_nothing_of_errors(loaded: Load) -> None:
    watched = Watched(loaded(SMALLER), [])

    def fail() -> None:
        raise RuntimeError("as a library may")

    watched.look = fail
    model = DraftModel(watched, watched.vocab_size)
    for turn in range(2 * FAILURES_MAX):
        model.propose([wish(str(turn), 20, count=turn % 2)])
    assert len(watched.rows_of) == FAILURES_MAX


def test_nothing_is_drafted_behind_an_end(loaded: Load) -> None:
    watched = Watched(loaded(SMALLER), [])
    model = DraftModel(watched, watched.vocab_size)
    free = wish("free", 20)
    (drafted,) = model.propose([free])[0]
    assert len(drafted) == AHEAD
    watched.rows_of.clear()
    ended = replace(free.sequence.request, eos_token_ids=(drafted[0],))
    told = DraftRequest(Sequence(ended, []), Proposal(wanted=AHEAD), free.output, free.most)
    assert model.propose([told])[0] == [drafted[:1]]
    assert len(watched.rows_of) == 1


def test_nothing_is_proposed_behind_an_end_in_the_middle_of_what_was_taken() -> None:
    sequence = Sequence(Request("one", (1, 2), 9, eos_token_ids=(5,)), [3])
    assert output_after(sequence, (Token(4), Token(6))) == [3, 4, 6]
    assert output_after(sequence, (Token(4), Token(5), Token(6))) == []
    assert output_after(sequence, ()) == []


def test_errors_that_pass_are_forgotten(loaded: Load) -> None:
    watched, steps = Watched(loaded(SMALLER), []), count()

    def fail_mostly() -> None:
        if next(steps) % FAILURES_MAX:
            raise RuntimeError("as a library may")

    watched.look = fail_mostly
    model = DraftModel(watched, watched.vocab_size)
    drafted = [len(model.propose([wish(str(turn), 20, count=1)])[0][0]) for turn in range(12)]
    assert drafted == [1, 0, 0] * 4


def test_who_wants_none_gives_its_pages_to_who_does_and_who_can_have_none_again_keeps_none(
    loaded: Load,
) -> None:
    """This includes a sequence that is asked in the same step, as behind tokens that a grammar forces."""
    engine = loaded(SMALLER, 4)
    model = DraftModel(engine, engine.vocab_size)
    one, other = wish("one", 20), wish("other", 29)
    assert len(model.propose([one])[0][0]) == AHEAD
    none = DraftRequest(one.sequence, one.proposal, one.output, 0)
    assert [len(each) for each in model.propose([none, other])[0]] == [0, AHEAD]
    assert taken_pages(model) == 3
    model.propose([again(other, *(7,) * (engine.context_length - 28))])
    assert taken_pages(model) == 0, "past what the model can read"


def test_ids_that_one_of_two_widths_lacks_are_not_drafted_and_nothing_behind_one(loaded: Load) -> None:
    """Qwen2.5's 7B and 0.5B have such vocabularies, padded to different widths. The other model never looks
    up a missing id."""
    watched = Watched(loaded(SMALLER), [])
    model = DraftModel(watched, watched.vocab_size)
    request = Request("low", (0, 1) * 10, TOKENS, sampling=GREEDY)
    low = DraftRequest(Sequence(request, []), Proposal(wanted=AHEAD), (1,), AHEAD)
    (drafted,) = model.propose([low])[0]
    assert len(drafted) == AHEAD
    assert drafted[0] > 1
    assert DraftModel(watched, drafted[0] + 1).propose([low])[0][0][:1] == drafted[:1]
    assert DraftModel(watched, drafted[0]).propose([low])[0] == [[]], "it is the first that the other lacks"
    model.release(low.proposal)
    watched.rows_of.clear()
    wide = watched.vocab_size
    assert model.propose([again(wish("three", 20), 7, wide)])[0] == [[]]
    told = wish("four", 20)
    assert len(model.propose([told])[0][0]) == AHEAD
    assert model.propose([again(told, 7, wide)])[0] == [[]]
    assert model.propose([again(told, 7, wide, 8)])[0] == [[]]
    assert len(watched.rows_of) == AHEAD
    assert taken_pages(model) == 0


def test_nothing_is_drafted_beyond_what_the_model_can_read_nor_where_it_is_not_wanted(loaded: Load) -> None:
    engine = loaded(SMALLER)
    model = DraftModel(engine, engine.vocab_size)
    longest = engine.context_length
    assert model.propose([wish("long", longest - AHEAD + 1)])[0] == [[]]
    assert model.propose([wish("nothing", 20, count=0)])[0] == [[]]
    assert taken_pages(model) == 0


def test_another_vocabulary_is_refused_by_the_first_token_that_differs(
    tiny_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    config = (tiny_dir(MAIN) / "config.json").read_text(encoding="utf-8")
    one, other, longer = (tmp_path / name for name in ("one", "other", "longer"))
    for directory in (one, other, longer):
        directory.mkdir()
        (directory / "config.json").write_text(config, encoding="utf-8")
        tokenizers.byte_level().save_pretrained(directory)
    check_vocabulary(one, other)
    file = other / "tokenizer.json"
    told = json.loads(file.read_text(encoding="utf-8"))
    known = told["model"]["vocab"]
    known["a"], known["b"] = known["b"], known["a"]
    file.write_text(json.dumps(told), encoding="utf-8")
    differs = rf"its token {known['b']} is 'b', and that of the model .*one 'a'"
    with pytest.raises(StartupError, match=differs):
        check_vocabulary(other, one)
    (longer / "config.json").write_text(config.replace('"vocab_size": 131', '"vocab_size": 140'))
    check_vocabulary(longer, one)  # as wide as a GPU likes it


def test_too_little_memory_for_drafts_is_said_of_their_setting(
    tiny_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_dir(MAIN), model)
    tokenizers.byte_level().save_pretrained(model)
    settings = DecodeSettings(model=str(model), device="cpu", speculate=f"model:{model}", draft_memory=1)
    with pytest.raises(StartupError, match=re.escape(f"--speculate model:{model}: ") + ".*--draft-memory"):
        start_engine(settings, 1)


@pytest.mark.parametrize(("how", "coded"), [("none", 0), ("int8", 2)])
def test_weights_of_both_are_codes_where_the_models_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, coded: int
) -> None:
    model = save(CODED, tmp_path / "model")
    tokenizers.byte_level().save_pretrained(model)
    settings = DecodeSettings(model=str(model), device="cpu", speculate=f"model:{model}", quantize=how)
    caplog.set_level(logging.INFO)
    start_engine(settings, 1)
    assert [each.getMessage() for each in caplog.records].count("weights are kept as codes") == coded


def test_what_is_wrong_with_a_draft_model_is_said_of_it(
    tiny_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the draft model's setting, and comes before the larger model is loaded."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("baton.engine.engine_startup.load_engine", pytest.fail)
    for model in (tmp_path / "absent", tmp_path / "empty"):
        settings = DecodeSettings(model=str(tiny_dir(MAIN)), device="cpu", speculate=f"model:{model}")
        with pytest.raises(StartupError, match=re.escape(f"--speculate model:{model}: th")):
            start_engine(settings, 1)
