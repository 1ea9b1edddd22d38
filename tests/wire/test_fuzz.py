"""Random tests that each decodable message is read as what it says or refused, and no other error is
raised."""

import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any, TypeVar

import pytest
import torch
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from baton.decode.prefill_peers import endpoint_to_wire
from baton.engine_interface import Sequence
from baton.pages.layout import DTYPE_BYTES, KvKind
from baton.prefill.routes import endpoint_from_wire
from baton.rooms.errors import PeerFault, Reason, Refusal
from baton.rooms.request import LOGPROBS_MAX, Request, Sampling, Token
from baton.rooms.trace import read_trace
from baton.sampling.sampler import sample
from baton.transfer.bounds import check_endpoint
from baton.transfer.transfer_protocol import TransferError
from baton.wire import conversions as wire
from baton.wire import event_messages
from baton.wire.baton.v1 import group_pb2, inference_pb2, rooms_pb2, workers_pb2
from baton.wire.conversions import TEXT_CHARS_MAX
from baton.wire.layout_messages import layout_from_wire, layout_to_wire
from baton.wire.registration import worker_from_wire
from baton.wire.text_validation import REQUEST_ID, request_id_from_wire, shown_from_wire
from tests.wire.fuzz import TEXTS, messages, unsigned

M = TypeVar("M", bound=Message)
T = TypeVar("T")

SENSIBLE = {
    "request_id": st.from_regex(REQUEST_ID, fullmatch=True),
    "traceparent": st.sampled_from(["", f"00-{'4b' * 16}-{'00f0' * 4}-01", f"00-{'0' * 32}-{'1' * 16}-01"]),
    "output": st.lists(unsigned(32), max_size=3),
    "prompt": st.lists(unsigned(32), min_size=1, max_size=6),
    "max_tokens": st.integers(4, 2**32 - 1),
    "min_tokens": st.integers(0, 4),
    "temperature": st.just(0.0) | st.floats(wire.TEMPERATURE_MIN, wire.TEMPERATURE_MAX),
    "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 100),
    "presence_penalty": st.floats(-wire.PENALTY_MAX, wire.PENALTY_MAX),
    "frequency_penalty": st.floats(-wire.PENALTY_MAX, wire.PENALTY_MAX),
    "logit_bias": st.dictionaries(unsigned(32), st.floats(-wire.BIAS_MAX, wire.BIAS_MAX), max_size=4),
    "Sampling.top_logprobs": st.integers(0, LOGPROBS_MAX),
    "logprob_token_ids": st.lists(unsigned(32), max_size=3),
    "prompt_logprobs": st.integers(0, 100),
    "logprob": st.floats(max_value=0, allow_nan=False),
    "reason": st.sampled_from([each.value for each in Reason]),
    "side": st.sampled_from([rooms_pb2.SIDE_PREFILL, rooms_pb2.SIDE_DECODE]),
    "Peer.name": st.just("worker-0"),
    "Peer.address": st.just("127.0.0.1:1"),
    "dtype": st.sampled_from(sorted(DTYPE_BYTES)),
    "KvGroup.kind": st.sampled_from([each.value for each in KvKind]),
    "KvLayout.quantize": st.sampled_from(["none", "int8"]),
}
KINDS: list[type[Message]] = [
    inference_pb2.InferenceRequest,
    inference_pb2.ConnectRequest,
    inference_pb2.GrantRequest,
    inference_pb2.HandOverRequest,
    inference_pb2.HandOverReply,
    inference_pb2.StreamRoomReply,
    rooms_pb2.Room,
    workers_pb2.RegisterRequest,
    group_pb2.Commands,
]


def read(convert: Callable[[M], T], message: M) -> tuple[T] | None:
    """Convert `message`, and return the result in a tuple, or None if it is refused."""
    try:
        return (convert(message),)
    except (Refusal, PeerFault):
        return None


def canonical(message: Message) -> bytes:
    """Return bytes by which two messages compare as equal, with NaN equal to NaN and unknown fields
    dropped."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    return known.SerializeToString(deterministic=True)


@given(messages(inference_pb2.InferenceRequest, SENSIBLE))
def test_a_request_is_what_it_says_or_refused(message: inference_pb2.InferenceRequest) -> None:
    request = read(wire.request_from_wire, message)
    if request is not None:
        message.ClearField("time_left_ms")  # of the moment, and no part of the request
        given_as = read_trace(message.traceparent, message.tracestate)
        message.traceparent, message.tracestate = ("", "") if given_as is None else astuple(given_as)
        assert canonical(wire.request_to_wire(request[0])) == canonical(message)


VOCABULARY = 64
NEIGHBOUR = Sequence(Request("neighbour", (1, 2), 5, sampling=Sampling(top_logprobs=2, seed=3)), [1])


@given(
    messages(inference_pb2.InferenceRequest, SENSIBLE), st.lists(st.integers(0, VOCABULARY - 1), max_size=4)
)
def test_what_is_taken_can_be_drawn_and_leaves_its_neighbour_alone(
    message: inference_pb2.InferenceRequest, output: list[int]
) -> None:
    """A request that cannot be drawn would fail the step of all requests in it."""
    request = read(wire.request_from_wire, message)
    if request is None:
        return
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(7)) * 20
    drawn, neighbour = sample(logits, [Sequence(request[0], output), NEIGHBOUR])
    assert isinstance(drawn, Token)
    assert 0 <= drawn.id < VOCABULARY
    assert all(0 <= token < VOCABULARY for token, _ in drawn.top)
    assert [neighbour] == sample(logits[1:], [NEIGHBOUR])


@given(messages(inference_pb2.Token, SENSIBLE))
def test_a_token_is_what_it_says_or_refused(message: inference_pb2.Token) -> None:
    token = read(wire.token_from_wire, message)
    if token is not None:
        assert canonical(wire.token_to_wire(token[0])) == canonical(message)


@given(messages(inference_pb2.Token))
def test_a_logprob_is_a_number_that_can_be_shown(message: inference_pb2.Token) -> None:
    token = read(wire.token_from_wire, message)
    if token is not None:
        own = [] if token[0].logprob is None else [token[0].logprob]
        assert all(logprob < math.inf for logprob in (*own, *(logprob for _, logprob in token[0].top)))


@given(messages(rooms_pb2.Cause, SENSIBLE))
def test_a_cause_is_what_it_says_or_refused(message: rooms_pb2.Cause) -> None:
    cause = read(wire.cause_from_wire, message)
    if cause is not None:
        message.text = shown_from_wire(message.text, TEXT_CHARS_MAX)
        assert canonical(wire.cause_to_wire(cause[0])) == canonical(message)


@given(messages(rooms_pb2.Outcome, SENSIBLE))
def test_an_outcome_is_what_it_says_or_refused(message: rooms_pb2.Outcome) -> None:
    outcome = read(wire.outcome_from_wire, message)
    if outcome is not None:
        assert (outcome[0] is None) == (not message.HasField("cause"))
        if message.HasField("cause"):
            message.cause.text = shown_from_wire(message.cause.text, TEXT_CHARS_MAX)
        assert canonical(wire.outcome_to_wire(outcome[0])) == canonical(message)


@given(messages(workers_pb2.KvLayout, SENSIBLE))
def test_a_layout_is_what_it_says_or_refused(message: workers_pb2.KvLayout) -> None:
    layout = read(layout_from_wire, message)
    if layout is not None:
        assert canonical(layout_to_wire(layout[0])) == canonical(message)
        assert sum(group.page_bytes for group in layout[0].groups) > 0


@given(messages(workers_pb2.RegisterRequest, SENSIBLE))
def test_a_worker_is_what_it_says_or_refused(message: workers_pb2.RegisterRequest) -> None:
    facts = read(worker_from_wire, message)
    if facts is not None:
        assert canonical(wire.peer_to_wire(facts[0])) == canonical(message.worker)
        assert wire.side_to_wire(facts[0].side) == message.side
        assert facts[0].tokens_max == message.tokens_max


@given(messages(rooms_pb2.RoomEvent))
def test_an_event_is_cut_to_its_bounds(message: rooms_pb2.RoomEvent) -> None:
    event = event_messages.event_from_wire(message.SerializeToString(), "teller")
    back = event_messages.event_to_wire(event)
    assert back.detail == shown_from_wire(message.detail, 512)
    assert back.source == "teller"
    assert (back.name + back.detail).isprintable()
    assert len(back.name) <= 64
    assert len(back.detail) <= 512


@given(messages(inference_pb2.Endpoint, SENSIBLE))
def test_an_endpoint_is_what_it_says_and_is_checked_before_it_is_used(
    message: inference_pb2.Endpoint,
) -> None:
    endpoint = endpoint_from_wire(message)
    assert canonical(endpoint_to_wire(endpoint)) == canonical(message)
    try:
        check_endpoint(endpoint)
    except TransferError:
        return
    assert all(region.address + region.length <= 2**64 for region in endpoint.regions)


@given(st.integers(-(2**31), 2**31 - 1))
def test_a_finish_is_one_of_ours_or_refused(value: int) -> None:
    finish = read(wire.finish_from_wire, value)  # type: ignore[type-var]
    if finish is not None:
        assert wire.finish_to_wire(finish[0]) == value


@given(unsigned(64))
def test_a_room_is_a_number_from_one_on(room: int) -> None:
    assert (read(wire.room_from_wire, room) is None) == (room == 0)  # type: ignore[type-var]


@given(TEXTS)
def test_a_request_id_is_kept_or_refused_whole(request_id: str) -> None:
    kept = read(request_id_from_wire, request_id)  # type: ignore[type-var]
    assert kept == ((request_id,) if REQUEST_ID.fullmatch(request_id) else None)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_bytes_are_a_message_or_refused_by_the_decoder(kind: type[Message], data: st.DataObject) -> None:
    """This includes valid messages with bytes changed, cut off or doubled."""
    raw = bytearray(data.draw(messages(kind, SENSIBLE)).SerializeToString()[:4096])
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 255)), max_size=4)):
        if raw:
            raw[place % len(raw)] = value
    raw = raw[: data.draw(st.integers(0, len(raw)))] + data.draw(st.binary(max_size=8))
    try:
        message: Any = kind.FromString(bytes(raw))
    except DecodeError:
        return
    canonical(message)
