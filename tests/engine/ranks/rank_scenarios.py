"""Functions that every rank of a worker runs in the tests of rank groups."""

import os
import signal
import time
from collections.abc import Sequence as Sequenced
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from baton.engine.loading.engine_loading import load_engine
from baton.engine.torch_engine import TorchEngine
from baton.engine_interface import DrawFailed, PageSum, Proposal, RankGroupBroken, Row, Sequence
from baton.inference.page_checksum import PageSummer
from baton.inference.process_group import join_rank_group
from baton.rooms.request import Grammar, GrammarKind, Request, Sampling, Score, Token
from baton.sampling.draft_model import DraftModel
from tests.engine.ranks.rank_processes import HOST, Post
from tests.grammars.answers import END, fold_of
from tests.inference.engine_worker import GREEDY, Guesses, ShuffledWorker

Answers = list[list[int]]


def answers(
    post: Post, directory: Path, prompts: Answers, tokens: int, chunks: Sequenced[int], memory: int = 2**21
) -> dict[str, Any]:
    """Return greedy answers, chunk by chunk with all prompts in every step, and the memory of this rank."""
    engine = post.engine(directory, kv_cache_memory=memory)
    engine.warm_up()
    told = [_greedy(engine, prompts, tokens, chunk) for chunk in chunks]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in engine.model.weights()}
    weights = sum(each.nbytes() for each in storages.values()) // 4
    return {"outputs": told, "weights": weights, "pages": engine.cache.pages, "layout": engine.layout}


def _greedy(engine: TorchEngine, prompts: Answers, tokens: int, chunk: int) -> Answers:
    worker = ShuffledWorker(engine, seed=chunk)
    return worker.run([worker.admit(prompt, tokens) for prompt in prompts], chunk)


def draws(
    post: Post,
    directory: Path,
    prompts: Answers,
    samplings: Sequenced[Sampling],
    tokens: int,
    dtype: str = "float32",
) -> list[list[Token]]:
    """Return the draws of every prompt with its own settings, all in the same steps."""
    return drawn(post.engine(directory, dtype), prompts, samplings, tokens)


def drawn(
    engine: TorchEngine, prompts: Answers, samplings: Sequenced[Sampling], tokens: int
) -> list[list[Token]]:
    worker = ShuffledWorker(engine)
    tenants = [
        worker.admit(prompt, tokens, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    told: list[list[Token]] = [[] for _ in tenants]
    while not all(tenant.done for tenant in tenants):
        open_rooms = [index for index, tenant in enumerate(tenants) if not tenant.done]
        for index, token in zip(open_rooms, worker.step(tenants, 9), strict=True):
            if token is not None:
                told[index].append(token)
    return told


def guessed(
    post: Post,
    directory: Path,
    prompts: Answers,
    samplings: Sequenced[Sampling],
    tokens: int,
    answers: Sequenced[Sequenced[Token]],
) -> tuple[list[list[Token]], int]:
    """Return draws with drafts, some of which are right, and the number of steps."""
    worker = ShuffledWorker(post.engine(directory))
    tenants = [
        worker.admit(*asked) for asked in zip(prompts, [tokens] * len(prompts), samplings, strict=True)
    ]
    outputs = {
        tenant.sequence.request.request_id: [token.id for token in answer]
        for tenant, answer in zip(tenants, answers, strict=True)
    }
    return worker.answers(tenants, Guesses(outputs, worker.engine.vocab_size), 9)


def proposed(
    post: Post, directory: Path, prompt: list[int], grammar: Grammar
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return an answer that follows `grammar`, and the drafts checked in each step, which the previous step
    proposed."""
    engine = post.engine(directory)
    worker = ShuffledWorker(engine)
    tenant = worker.admit(prompt, 60)
    asked = replace(tenant.sequence.request, eos_token_ids=(END,), grammar=grammar)
    tenant.sequence = Sequence(asked, [])
    tenant.sequence.fold = None if engine.grammars is None else fold_of(grammar)
    tenant.sequence.proposal = proposal = Proposal()
    checked: list[tuple[int, ...]] = []
    while not tenant.done:
        checked.append(tuple(proposal.tokens))
        worker.guess([tenant], 100, lambda _: checked[-1])
    return tenant.sequence.output, checked


def drafted(
    post: Post, directory: Path, drafts: Path, prompts: Answers, sampling: Sampling, tokens: int
) -> tuple[Answers, list[list[list[int]]]]:
    """Return answers, and what each step proposed for each, with a draft model on the rank that draws."""
    engine = post.engine(directory)
    if engine.draws:
        beside = load_engine(drafts, dtype="float32", device="cpu", kv_cache_memory=2**21, threads=1)
        engine.draft_with(DraftModel(beside, engine.vocab_size))
    worker = ShuffledWorker(engine)
    tenants = [worker.admit(prompt, tokens, sampling) for prompt in prompts]
    proposals = [Proposal(wanted=4) for _ in tenants]
    for tenant, proposal in zip(tenants, proposals, strict=True):
        tenant.sequence.proposal = proposal
    told: list[list[list[int]]] = []
    while not all(tenant.done for tenant in tenants):
        worker.guess(tenants, 100, lambda tenant: proposals[tenants.index(tenant)].tokens)
        told.append([[*proposal.tokens] for proposal in proposals])
    return [tenant.sequence.output for tenant in tenants], told


def several(
    post: Post, directory: Path, prompts: Answers, sampling: Sampling, seeds: Sequenced[int], tokens: int
) -> list[Answers]:
    return forked(post.engine(directory), prompts, sampling, seeds, tokens)


def forked(
    engine: TorchEngine, prompts: Answers, sampling: Sampling, seeds: Sequenced[int], tokens: int
) -> list[Answers]:
    """Return a choice of each prompt for each seed, all in the same steps."""
    worker = ShuffledWorker(engine)
    rooms = [[worker.admit(prompt, tokens, replace(sampling, seed=seeds[0]))] for prompt in prompts]
    while not all(tenant.done for room in rooms for tenant in room):
        for room in rooms:
            if len(room) < len(seeds) and room[0].sequence.output:
                room.append(worker.fork(room[0], seeds[len(room)]))
        worker.step([tenant for room in rooms for tenant in room], engine.cache.group.page_tokens)
    return [[tenant.sequence.output for tenant in room] for room in rooms]


def one_by_one(
    engine: TorchEngine, prompts: Answers, sampling: Sampling, seeds: Sequenced[int], tokens: int
) -> list[Answers]:
    """Draw the same choices, each as a request of its own, one after the other."""
    worker = ShuffledWorker(engine)
    told: list[Answers] = []
    for prompt in prompts:
        told.append([])
        for seed in seeds:
            tenant = worker.admit(prompt, tokens, replace(sampling, seed=seed))
            told[-1] += worker.run([tenant], len(prompt))
            worker.release(tenant)
    return told


def scores(post: Post, directory: Path, prompts: Answers, top: int, chunk: int) -> list[list[Score]]:
    """Return the scores of every prompt, all in the same steps, beside one that is not scored."""
    return scored(ShuffledWorker(post.engine(directory)), prompts, top, chunk)


def scored(worker: ShuffledWorker, prompts: Answers, top: int, chunk: int) -> list[list[Score]]:
    beside = worker.admit(prompts[-1], 4)
    tenants = [worker.admit(prompt, 1, prompt_logprobs=top) for prompt in prompts]
    worker.run([*tenants, beside], chunk)
    return [each.sequence.scores.values if each.sequence.scores else [] for each in tenants]


def sums(post: Post, directory: Path, length: int, start: int) -> dict[str, Any]:
    """Sum a prompt's pages chunk by chunk beside one that is not summed, and return the sum of the pages on
    this rank."""
    engine = post.engine(directory)
    summed, beside = (Sequence(Request("r", tuple(range(length)), 8, sampling=GREEDY), []) for _ in range(2))
    summed.page_sum = PageSum(start)
    tables = [list(range(8)), list(range(8, 16))]
    early = ""
    for at in range(0, length, 7):
        stop = min(at + 7, length)
        rows = [
            Row(each, at, stop, (table,), stop == length)
            for each, table in zip((summed, beside), tables, strict=True)
        ]
        if at:
            try:
                summed.page_sum.of([(0, 0)])
            except ValueError as error:
                early = str(error)
        engine.step(rows)
    return {
        "everywhere": summed.page_sum.everywhere,
        "of none": summed.page_sum.of([]),
        "here": PageSummer(engine.cache).by_head(tables[0], start, length),
        "early": early,
        "layers": engine.layout.layers,
    }


def troubles(post: Post, directory: Path, prompt: list[int], poisoned: int) -> list[str]:
    """Run steps that fail on every rank alike, and then one that does not."""
    engine = post.engine(directory)
    worker = ShuffledWorker(engine)
    told: list[str] = []
    tenant = worker.admit(prompt, 4)
    worker.grow(tenant, len(prompt))
    good = Row(tenant.sequence, 0, len(prompt), (tenant.pages,), sample=True)

    def attempt(row: Row) -> None:
        try:
            (taken,) = engine.step([row])
            if isinstance(taken, DrawFailed):
                told.append(type(taken).__name__)
            else:
                told.append(f"drew {[token.id for token in taken]}")
        except ValueError as error:
            told.append(f"{type(error).__name__}: {error}")

    attempt(Row(tenant.sequence, 0, len(prompt) + 1, (tenant.pages,), sample=True))
    weight = engine.model.weights()[-1]
    kept = weight.clone()
    if post.rank == poisoned:
        weight.fill_(float("nan"))
    attempt(good)
    weight.copy_(kept)
    attempt(good)
    uncompiled = replace(tenant.sequence.request, grammar=Grammar(GrammarKind.REGEX, "a"))
    attempt(Row(Sequence(uncompiled, []), 0, len(prompt), (tenant.pages,), sample=True))
    return told


def end_in_a_step(post: Post, directory: Path, prompt: list[int], victim: int, way: str) -> tuple[str, float]:
    """Let the rank `victim` exit, hang or fail during a step. Returns what the others are told, how often,
    and after how many seconds."""
    engine = post.engine(directory)
    worker = ShuffledWorker(engine)
    tenant = worker.admit(prompt, 8)
    worker.step([tenant], len(prompt))
    if post.rank == victim:
        _trap(engine, way)
    begun = time.monotonic()
    told = []
    for _ in range(2):
        try:
            worker.step([tenant], 1)
        except RankGroupBroken as error:
            told.append(str(error))
    return " | ".join(told), time.monotonic() - begun


def _trap(engine: TorchEngine, way: str) -> None:
    write, left = engine.cache.write, [2]

    def trapped(layer: int, rows: torch.Tensor, entries: torch.Tensor) -> None:
        write(layer, rows, entries)
        left[0] -= 1
        if left[0]:
            return
        if way == "fail":
            raise RuntimeError("out of memory")
        os.kill(os.getpid(), signal.SIGKILL if way == "die" else signal.SIGSTOP)

    engine.cache.write = trapped  # type: ignore[method-assign]


def apart(post: Post, missing: int) -> str:
    """Form a group that the rank `missing` does not join, and return the error, or "met"."""
    if post.rank == missing:
        return ""
    try:
        post.rank_group()
    except RankGroupBroken as error:
        return str(error)
    return "met"


def slowly(post: Post, seconds: float) -> int:
    """Let the first rank wait for `seconds` before it sends what the second one waits for."""
    device = torch.device("cpu")
    rank_group = join_rank_group(post.topology, post.rank, HOST, post.port, post.timeout_s, device, 60)
    number = torch.zeros(1)
    if post.rank == 0:
        time.sleep(seconds)
        rank_group.send(number + 7)
        return int(rank_group.broadcast(1, None, 1)[0])
    number = rank_group.receive(number)
    return int(rank_group.broadcast(1, number.tolist(), 1)[0])
