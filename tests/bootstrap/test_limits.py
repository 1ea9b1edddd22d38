"""Tests of the capacity limits that the bootstrap publishes as workers join, leave or are suspected."""

from baton.api.backend import Limits
from baton.ids import Incarnation
from tests.bootstrap.scripted import House

CONTEXT_TOKENS = 500


def test_the_limits_are_those_of_the_workers_that_are_there() -> None:
    at = House()
    assert at.backend.limits() == Limits(CONTEXT_TOKENS, 0, 0)

    at.prefill.tokens_max, at.decode.tokens_max = 300, 400
    at.join(at.prefill)
    assert at.backend.limits().prompt_tokens == 300
    at.join(at.decode)
    assert at.backend.limits().sequence_tokens == at.backend.limits().sequence_tokens_now == 400

    at.decode.incarnation, at.decode.name, at.decode.tokens_max = Incarnation(33), "decode-1", 600
    at.join(at.decode)
    assert at.backend.limits().sequence_tokens_now == 600
    at.registry.drain(Incarnation(33))
    assert (at.backend.limits().sequence_tokens, at.backend.limits().sequence_tokens_now) == (600, 400)
    at.rooms.lose(Incarnation(33), "it has left", proof="left")
    assert at.backend.limits().sequence_tokens == 400

    for each in (Incarnation(22), at.prefill.incarnation):
        at.rooms.lose(each, "it is silent", proof=None)
    assert at.backend.limits() == Limits(CONTEXT_TOKENS, 0, 0)
