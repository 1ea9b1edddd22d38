"""Tests of the order in which deltas of an answer are passed on."""

import asyncio

from prometheus_client import CollectorRegistry

from baton.api.generation.answer_stream import answer, whole_batch
from baton.api.generation.choice_assembler import ChoiceAssembler, Delta
from baton.api.http.metrics import HttpMetrics
from baton.api.requests.meaning_reader import completion_meaning
from baton.api.requests.schemas import CompletionRequest
from baton.rooms.request import Request
from tests.api import tiny
from tests.api.scripted import LENGTH, ScriptedBackend, saying


async def test_several_choices_are_passed_on_by_one_task_at_a_time() -> None:
    """A client that is slow to take one choice's text gets no other choice's text meanwhile."""
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x"})
    requests = [Request(str(place), (5 + place,), 99) for place in range(3)]
    choices = [
        ChoiceAssembler(place, each, completion_meaning(body), tiny.detokenizer(each.prompt, body))
        for place, each in enumerate(requests)
    ]
    texts = dict.fromkeys(range(3), "")
    at_it = 0

    async def emit(choice: ChoiceAssembler, delta: Delta, _: bool) -> None:
        nonlocal at_it
        at_it += 1
        await asyncio.sleep(0)
        assert at_it == 1
        at_it -= 1
        texts[choice.index] += delta.text

    backend = ScriptedBackend(lambda _: saying("The quick brown fox", finish=LENGTH))
    await answer(backend, choices, HttpMetrics(CollectorRegistry()), 0.0, emit, whole_batch)
    assert set(texts.values()) == {"The quick brown fox"}
