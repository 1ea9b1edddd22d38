"""Tests that values survive the conversion to messages and back, and that invalid fields are refused by
name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.ids import Incarnation
from baton.pages.layout import (
    DTYPE_BYTES,
    GROUPS_MAX,
    PLANES_MAX,
    KvGroup,
    KvKind,
    KvLayout,
    KvPlane,
    full_group,
    state_group,
)
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Side
from baton.rooms.request import (
    CHOICES_MAX,
    GRAMMAR_BYTES_MAX,
    LOGIT_BIAS_MAX,
    LOGPROB_TOKEN_IDS_MAX,
    LOGPROBS_MAX,
    SCORES_MAX,
    FinishReason,
    Grammar,
    GrammarKind,
    Request,
    Sampling,
    Score,
    Token,
)
from baton.rooms.timeline import Event, Moment
from baton.rooms.worker_facts import OtherSide
from baton.topology import Topology
from baton.wire import conversions as wire
from baton.wire import event_messages
from baton.wire.baton.v1 import inference_pb2, rooms_pb2, workers_pb2
from baton.wire.conversions import Malformed
from baton.wire.layout_messages import (
    layout_from_wire,
    layout_to_wire,
    topology_from_wire,
    topology_to_wire,
)
from baton.wire.registration import worker_from_wire
from baton.wire.text_validation import LABEL, REQUEST_ID
from tests.layouts import one_group

ids = st.integers(0, 2**32 - 1)
id_tuples = st.lists(ids, max_size=8).map(tuple)
ascending = st.sets(ids, min_size=1, max_size=4).map(sorted).map(tuple)
numbers = st.floats(allow_nan=False, allow_infinity=False)
floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
penalties = st.floats(-wire.PENALTY_MAX, wire.PENALTY_MAX)
biases = st.floats(-wire.BIAS_MAX, wire.BIAS_MAX)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=64).map(
    lambda text: "".join(filter(str.isprintable, text))
)
labels = st.from_regex(LABEL, fullmatch=True)
seeds = st.integers(0, 2**64 - 1)
samplings = st.builds(
    Sampling,
    temperature=st.just(0.0) | st.floats(wire.TEMPERATURE_MIN, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=ids,
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    seed=seeds,
    logit_bias=st.dictionaries(ids, biases, max_size=5).map(lambda each: tuple(sorted(each.items()))),
    top_logprobs=st.none() | st.integers(0, LOGPROBS_MAX),
    logprob_token_ids=id_tuples,
)
requests = st.builds(
    Request,
    request_id=st.from_regex(REQUEST_ID, fullmatch=True),
    prompt=st.lists(ids, min_size=1, max_size=8).map(tuple),
    max_tokens=st.integers(5, 2**32 - 1),
    min_tokens=st.integers(0, 5),
    eos_token_ids=id_tuples,
    stop_token_ids=id_tuples,
    ignore_eos=st.booleans(),
    sampling=samplings,
    output=id_tuples,
    grammar=st.none() | st.builds(Grammar, kind=st.sampled_from(GrammarKind), text=texts),
    further_seeds=st.lists(seeds, max_size=3).map(tuple),
    prompt_logprobs=st.none() | st.integers(0, SCORES_MAX // 8 - 1),
).filter(lambda request: request.finish_reason(request.output) is None)


@given(requests)
def test_requests_come_back_as_they_were(request: Request) -> None:
    sent = wire.request_to_wire(request).SerializeToString()
    assert wire.request_from_wire(inference_pb2.InferenceRequest.FromString(sent)) == request


@given(st.builds(Token, ids, st.none() | numbers, st.lists(st.tuples(ids, numbers), max_size=4).map(tuple)))
def test_tokens_come_back_as_they_were(token: Token) -> None:
    sent = wire.token_to_wire(token).SerializeToString()
    assert wire.token_from_wire(inference_pb2.Token.FromString(sent)) == token


@given(
    st.integers(0, 4).flatmap(
        lambda top: st.lists(
            st.builds(
                Score, floats, ids, st.lists(st.tuples(ids, floats), min_size=top, max_size=top).map(tuple)
            )
        )
    )
)
def test_scores_come_back_as_they_were(scores: list[Score]) -> None:
    sent = [each.SerializeToString() for each in wire.scores_to_wire(scores)]
    told = [inference_pb2.Scores.FromString(each) for each in sent]
    assert [score for each in told for score in wire.scores_from_wire(each)] == scores
    assert all(each.first for each in told)


@given(st.none() | st.builds(Cause, st.sampled_from(Reason), texts))
def test_outcomes_come_back_as_they_were(cause: Cause | None) -> None:
    assert wire.outcome_from_wire(wire.outcome_to_wire(cause)) == cause


@pytest.mark.parametrize("finish", [None, *FinishReason])
def test_finishes_come_back_as_they_were(finish: FinishReason | None) -> None:
    assert wire.finish_from_wire(wire.finish_to_wire(finish)) is finish


groups = st.builds(
    KvGroup,
    kind=st.sampled_from(KvKind),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    page_tokens=st.integers(1, 4096),
    layers=ascending,
    heads=ascending,
    planes=st.lists(
        st.builds(KvPlane, name=labels, elements=st.integers(1, 256)), min_size=1, max_size=PLANES_MAX
    ).map(tuple),
)


@given(labels, st.lists(groups, min_size=1, max_size=GROUPS_MAX))
def test_layouts_come_back_as_they_were(model: str, listed: list[KvGroup]) -> None:
    apart = (
        replace(
            group, layers=tuple(sorted({layer // GROUPS_MAX * GROUPS_MAX + number for layer in group.layers}))
        )
        for number, group in enumerate(listed)
    )
    layout = KvLayout(model, tuple(apart))
    assert layout_from_wire(layout_to_wire(layout)) == layout


def test_a_layer_with_attention_and_a_state_is_in_two_groups() -> None:
    attention = full_group("bfloat16", 16, (0, 1), (0,), 64)
    states = state_group("float32", 512, (0, 1), (0,), (KvPlane("conv", 18), KvPlane("recurrent", 32)))
    layout = KvLayout("m", (attention, states), context_length=512)
    assert layout.layers == (0, 1)
    assert layout_from_wire(layout_to_wire(layout)) == layout


def group_message(**fields: Any) -> workers_pb2.KvGroup:
    planes = [workers_pb2.KvPlane(name="k", elements=1)]
    given: dict[str, Any] = {"kind": "full", "dtype": "float32", "page_tokens": 1, "planes": planes}
    return workers_pb2.KvGroup(**{**given, "layers": [0], "heads": [0], **fields})


@pytest.mark.parametrize("field", ["layers", "heads"])
@pytest.mark.parametrize("ids", [[1, 0], [0, 0], [0, 2, 2, 3], [0, 3, 2]])
def test_a_layout_that_names_a_layer_or_head_twice_or_out_of_order_is_refused(
    field: str, ids: list[int]
) -> None:
    message = workers_pb2.KvLayout(groups=[group_message(**{field: ids})])
    with pytest.raises(Malformed, match=f"layout.{field} are not in ascending order"):
        layout_from_wire(message)


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ([], "0 groups, from 1 to 4"),
        ([group_message(layers=[each]) for each in range(5)], "5 groups, from 1 to 4"),
        ([group_message(layers=[0, 1]), group_message(layers=[1])], "of one kind name a layer twice"),
        ([group_message(layers=[])], "empty dimension"),
        ([group_message(planes=[])], "empty dimension"),
        ([group_message(planes=[workers_pb2.KvPlane(name="k")])], "empty dimension"),
        ([group_message(planes=[workers_pb2.KvPlane(name="k", elements=1)] * 9)], "are 9, at most 8"),
        ([group_message(kind="window")], "kind has the unknown value 'window'"),
    ],
)
def test_groups_that_no_memory_has_are_refused(groups: list[workers_pb2.KvGroup], problem: str) -> None:
    with pytest.raises(Malformed, match=problem):
        layout_from_wire(workers_pb2.KvLayout(groups=groups))


def test_a_rank_may_hold_no_layer_of_a_group() -> None:
    message = workers_pb2.KvLayout(groups=[group_message(), group_message(layers=[])])
    assert [group.layers for group in layout_from_wire(message).groups] == [(0,), ()]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_topologies_come_back_as_they_were(tensor: int, pipeline: int, context: int) -> None:
    topology = Topology(tensor, pipeline, context)
    assert topology_from_wire(topology_to_wire(topology)) == topology


def test_a_worker_that_does_not_say_is_one_rank() -> None:
    assert topology_from_wire(workers_pb2.Topology()) == Topology()


@pytest.mark.parametrize("dimension", ["tensor_parallel", "pipeline_parallel", "context_parallel"])
def test_more_ranks_than_a_worker_has_are_refused(dimension: str) -> None:
    with pytest.raises(Malformed, match=r"topology: .* ranks, a worker has 1024 at most"):
        topology_from_wire(workers_pb2.Topology(**{dimension: 2**32 - 1}))


@given(st.builds(Event, st.integers(0, 2**62), texts, texts, texts, st.integers(0, 2**62)))
def test_events_come_back_as_they_were(event: Event) -> None:
    assert (
        event_messages.event_from_wire(event_messages.event_to_wire(event).SerializeToString(), event.source)
        == event
    )


def odd_scores(**other: Any) -> inference_pb2.Scores:
    """Return the scores of one token, with these fields replaced."""
    return inference_pb2.Scores(**{"first": 1, "logprobs": [-1.0], "ranks": [1], **other})


def sensible() -> inference_pb2.InferenceRequest:
    return wire.request_to_wire(Request("r", (1, 2), 4, sampling=Sampling()))


def change(**fields: Any) -> Callable[[], object]:
    """Return a function that converts a sensible request with these fields, or those of its sampling,
    replaced."""

    def read() -> object:
        message = sensible()
        for name, value in fields.items():
            part: Any = message if name in message.DESCRIPTOR.fields_by_name else message.sampling
            if isinstance(value, list):
                getattr(part, name)[:] = value
            elif isinstance(value, dict):
                getattr(part, name).update(value)
            else:
                setattr(part, name, value)
        return wire.request_from_wire(message)

    return read


def held(kind: str, text: str) -> Callable[[], object]:
    """Return a function that converts a sensible request with that grammar."""
    message = sensible()
    message.grammar.kind, message.grammar.text = kind, text
    return lambda: wire.request_from_wire(message)


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "read"),
    [
        ("prompt", change(prompt=[])),
        ("max_tokens", change(max_tokens=0)),
        ("min_tokens", change(min_tokens=5)),
        ("request_id", change(request_id="x" * 300)),
        ("request_id", change(request_id="a b")),
        ("stop_token_ids", change(stop_token_ids=[1] * 65)),
        ("eos_token_ids", change(eos_token_ids=[1] * 1025)),
        ("output", change(output=[1, 2, 3, 4])),
        ("output", change(output=[1, 9], stop_token_ids=[9])),
        ("temperature", change(temperature=-0.1)),
        ("temperature", change(temperature=NAN)),
        ("temperature", change(temperature=1e-50)),
        ("temperature", change(temperature=1e300)),
        ("top_p", change(top_p=0.0)),
        ("top_p", change(top_p=1.1)),
        ("min_p", change(min_p=-0.1)),
        ("repetition_penalty", change(repetition_penalty=0.0)),
        ("repetition_penalty", change(repetition_penalty=1e-50)),
        ("presence_penalty", change(presence_penalty=INFINITY)),
        ("presence_penalty", change(presence_penalty=-1e300)),
        ("frequency_penalty", change(frequency_penalty=NAN)),
        ("logit_bias", change(logit_bias={3: NAN})),
        ("logit_bias", change(logit_bias={3: 1e300})),
        ("logit_bias", change(logit_bias=dict.fromkeys(range(LOGIT_BIAS_MAX + 1), 1.0))),
        ("top_logprobs", change(top_logprobs=LOGPROBS_MAX + 1)),
        ("logprob_token_ids", change(logprob_token_ids=[7] * (LOGPROB_TOKEN_IDS_MAX + 1))),
        ("prompt_logprobs", change(prompt=[1, 2], prompt_logprobs=SCORES_MAX // 2)),
        ("equally many", lambda: wire.scores_from_wire(inference_pb2.Scores())),
        ("equally many", lambda: wire.scores_from_wire(odd_scores(ranks=[1, 2]))),
        ("equally many", lambda: wire.scores_from_wire(odd_scores(top_tokens=[1]))),
        ("below infinity", lambda: wire.scores_from_wire(odd_scores(logprobs=[NAN]))),
        (
            "below infinity",
            lambda: wire.scores_from_wire(odd_scores(top_tokens=[1], top_logprobs=[INFINITY])),
        ),
        ("further_seeds", change(further_seeds=[7] * CHOICES_MAX)),
        ("grammar has more", held("lark", "é" * GRAMMAR_BYTES_MAX)),
        ("grammar.kind", held("xml", "<a/>")),
        ("finish", lambda: wire.finish_from_wire(17)),
        ("reason", lambda: wire.cause_from_wire(rooms_pb2.Cause(reason="bad luck"))),
        ("dtype", lambda: layout_from_wire(workers_pb2.KvLayout(groups=[group_message(dtype="int4")]))),
        ("dimension", lambda: layout_from_wire(workers_pb2.KvLayout(groups=[group_message(heads=[])]))),
        ("room", lambda: wire.room_from_wire(0)),
        ("decode needs", lambda: wire.check_peer(rooms_pb2.Peer(name="x", address="y"), "decode")),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_field(field: str, read: Callable[[], object]) -> None:
    with pytest.raises(Malformed, match=field):
        read()


def test_a_sensible_request_is_taken() -> None:
    change()()
    change(further_seeds=[7] * (CHOICES_MAX - 1))()


@given(requests)
def test_each_choice_is_a_request_of_its_own_with_its_own_seed(request: Request) -> None:
    """`own-draws`"""
    choices = [request.choice(place) for place in range(request.choices)]
    assert [each.sampling.seed for each in choices] == [request.sampling.seed, *request.further_seeds]
    for each in choices:
        assert each.choices == 1
        sampling = replace(each.sampling, seed=request.sampling.seed)
        assert replace(each, sampling=sampling, further_seeds=request.further_seeds) == request


def registration(**fields: Any) -> workers_pb2.RegisterRequest:
    message = workers_pb2.RegisterRequest(
        worker=rooms_pb2.Peer(name="w", incarnation=3, address="a:1"),
        side=rooms_pb2.SIDE_DECODE,
        topology=workers_pb2.Topology(tensor_parallel=2, pipeline_parallel=3),
        layout=layout_to_wire(one_group("m", "bfloat16", 16, (0, 1), (0,), 64)),
        schema="s",
        tokens_max=10,
        rooms_max=2,
        pid=7,
    )
    for name, value in fields.items():
        if value is None:
            message.ClearField(name)  # type: ignore[arg-type]
        else:
            setattr(message, name, value)
    return message


def test_a_registration_says_what_its_engine_promises_and_an_older_one_promises_nothing() -> None:
    facts = worker_from_wire(registration())
    assert (facts.engine, facts.batch_invariant, facts.whole_prompts) == ("", False, False)
    told = worker_from_wire(registration(engine="vllm", batch_invariant=True, whole_prompts=True))
    assert (told.engine, told.batch_invariant, told.whole_prompts) == ("vllm", True, True)


def test_a_registration_says_what_the_worker_is() -> None:
    facts = worker_from_wire(registration())
    assert (facts.name, facts.side, facts.incarnation, facts.pid) == ("w", Side.DECODE, 3, 7)
    assert (facts.model, facts.topology, facts.tokens_max, facts.rooms_max) == ("m", Topology(2, 3), 10, 2)
    layout = layout_to_wire(one_group("m", "bfloat16", 16, (0, 1), (0,), 64, context_length=4096))
    longer = registration()
    longer.layout.CopyFrom(layout)
    assert (facts.context_length, worker_from_wire(longer).context_length) == (0, 4096)
    assert layout_from_wire(layout).context_length == 4096
    assert layout_from_wire(layout).quantize == "none"
    assert layout_from_wire(layout).groups[0].encoding == facts.stack.encoding[0] == "plain"
    layout.groups[0].encoding = ""  # a peer that does not know the field
    assert layout_from_wire(layout).groups[0].encoding == "plain"
    layout.groups[0].encoding = "amx"
    assert layout_from_wire(layout).groups[0].encoding == "amx"
    layout.quantize = "int8"
    assert layout_from_wire(layout).quantize == "int8"
    longer.layout.CopyFrom(layout)
    told = [each.stack.quantize for each in (facts, worker_from_wire(longer))]
    assert told == ["none", "int8"], "what a worker that does not say does"
    assert facts.page_tokens == 16
    assert "page_tokens" not in facts.stack.in_words(), "need not be equal"
    assert facts.stack.schema == "s"
    assert facts.stack.kv_checksum == "record", "what a worker that does not say does"
    summing = worker_from_wire(registration(kv_checksum="pages"))
    assert summing.stack.kv_checksum == "pages"
    kept = [facts.keeps_prefixes, worker_from_wire(registration(keeps_prefixes=True)).keeps_prefixes]
    assert kept == [False, True]


@pytest.mark.parametrize(
    "fields",
    [
        {"side": 0},
        {"worker": None},
        {"tokens_max": 0},
        {"rooms_max": 0},
        {"layout": None},
        {"kv_checksum": "crc"},
    ],
)
def test_a_registration_without_what_counts_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        worker_from_wire(registration(**fields))


def test_a_side_of_a_process_names_the_other() -> None:
    assert worker_from_wire(registration()).other_side is None
    message = registration()
    message.other_side.CopyFrom(workers_pb2.OtherSide(incarnation=4, process="worker-0", prefill_weight=0))
    assert worker_from_wire(message).other_side == OtherSide(Incarnation(4), "worker-0", 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"incarnation": 0},
        {"incarnation": 3},
        {"process": ""},
        {"process": "x" * 129},
        {"prefill_weight": 101},
    ],
)
def test_another_side_that_cannot_be_one_is_refused(fields: dict[str, Any]) -> None:
    message = registration()
    message.other_side.CopyFrom(
        workers_pb2.OtherSide(**{"incarnation": 4, "process": "worker-0", "prefill_weight": 100, **fields})
    )
    with pytest.raises(Malformed):
        worker_from_wire(message)


def test_long_texts_are_cut() -> None:
    cause = wire.cause_from_wire(rooms_pb2.Cause(reason="refused", text="x" * 10_000))
    assert len(cause.text) == wire.TEXT_CHARS_MAX
    told = rooms_pb2.RoomEvent(name="n" * 999, detail="d" * 9_999)
    event = event_messages.event_from_wire(told.SerializeToString(), "teller")
    assert (len(event.name), len(event.detail)) == (64, 512)


def test_a_line_is_kept_as_it_came_if_it_is_short_and_cut_at_once_if_not() -> None:
    short, long = (rooms_pb2.RoomEvent(name="n", detail="d" * length) for length in (99, 9_999))
    kept = event_messages.line_from_wire(short.SerializeToString(), "teller")
    assert not isinstance(kept, Event)
    assert kept() == Event(0, "teller", "n", "d" * 99)
    assert event_messages.line_from_wire(long.SerializeToString(), "teller") == Event(
        0, "teller", "n", "d" * 512
    )


def test_a_line_that_is_none_says_so_when_it_is_read() -> None:
    assert event_messages.event_from_wire(b"\xff", "teller") == Event(0, "teller", Moment.UNREADABLE)
