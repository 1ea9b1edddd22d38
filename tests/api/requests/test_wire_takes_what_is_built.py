"""Tests that the wire accepts every request that the request builder lets through.

Requests are made at the bounds of what is allowed, field by field and together. One that the wire refused
would be a 503 of a healthy stack (`canary-is-a-request`).
"""

from typing import Any, Final, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.backend import Limits
from baton.api.http.request_headers import REQUEST_ID
from baton.api.requests.field_types import PROMPTS_MAX
from baton.api.requests.meaning_reader import chat_meaning, completion_meaning
from baton.api.requests.request_builder import FEW_LOGPROBS, admit
from baton.api.requests.schemas import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    RecommendedSampling,
)
from baton.rooms.request import (
    EOS_TOKEN_IDS_MAX,
    GRAMMAR_BYTES_MAX,
    LOGIT_BIAS_MAX,
    STOP_TOKEN_IDS_MAX,
    Grammar,
    GrammarKind,
)
from baton.rooms.trace import TraceContext
from baton.wire.baton.v1 import inference_pb2
from baton.wire.conversions import request_from_wire, request_to_wire
from baton.wire.model_bounds import ModelBounds

VOCABULARY: Final = 2**18
CONTEXT: Final = 4096
LAST: Final = VOCABULARY - 1
TINY: Final = 5e-324
"""The least number above 0."""


class Defaults(NamedTuple):
    name: str
    eos_token_ids: tuple[int, ...]
    vocabulary: int = VOCABULARY
    recommended_sampling: RecommendedSampling = RecommendedSampling()


def at_borders(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


FIELDS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "temperature": at_borders(0.0, -0.0, TINY, 9.999e-6, 1e-5, 1.0, 2.0),
    "top_p": at_borders(TINY, 1e-300, 0.5, 1.0),
    "top_k": at_borders(-1, 0, 1, LAST, VOCABULARY, 2**70),
    "min_p": at_borders(0.0, -0.0, TINY, 1.0),
    "repetition_penalty": at_borders(0.01, 1.0, 100.0),
    "presence_penalty": at_borders(-2.0, 0.0, 2.0),
    "frequency_penalty": at_borders(-2.0, 0.0, 2.0),
    "seed": at_borders(-(2**63), -1, 0, 2**63 - 1),
    "min_tokens": at_borders(0, 1),
    "ignore_eos": st.booleans(),
    "stop_token_ids": at_borders(
        [], [0], [LAST], [7] * STOP_TOKEN_IDS_MAX, [*range(LAST, LAST - STOP_TOKEN_IDS_MAX, -1)]
    ),
    "logit_bias": at_borders(
        {},
        {"0": -100, "00": 100.0, f"{LAST}": 1e-300},
        {str(each): (-1) ** each * 100.0 for each in range(LOGIT_BIAS_MAX)},
    ),
    "max_tokens": at_borders(1, CONTEXT - 24),
}
ENDS: Final = at_borders((), (0,), (LAST,), tuple(range(EOS_TOKEN_IDS_MAX)))
IDS: Final = at_borders("a", "x" * 128)
GRAMMARS: Final = at_borders(
    None, Grammar(GrammarKind.LARK, ""), Grammar(GrammarKind.REGEX, "é" * (GRAMMAR_BYTES_MAX // 2))
)
TRACES: Final = at_borders(None, TraceContext(f"00-{1:032x}-{1:016x}-01", "k=" + "v" * 510))


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries({}, optional=FIELDS),
    ENDS,
    IDS,
    TRACES,
    GRAMMARS,
    at_borders(0, 1, 2**128 - 1),
    st.booleans(),
    st.data(),
)
def test_what_intake_admits_comes_back_from_the_wire_as_it_was(
    fields: dict[str, Any],
    ends: tuple[int, ...],
    request_id: str,
    trace: TraceContext | None,
    grammar: Grammar | None,
    salt: int,
    chat: bool,
    data: st.DataObject,
) -> None:
    assert REQUEST_ID.fullmatch(request_id)
    count = 1 if chat else data.draw(at_borders(1, PROMPTS_MAX))
    prompts = [[0, LAST] * data.draw(at_borders(1, 12))] * count
    logprobs = data.draw(at_borders(None, 0, FEW_LOGPROBS))
    body: GenerationRequest
    if chat:
        told = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
        talk = ChatRequest(model="m", messages=[Message(role="user", content="Hi")], **fields, **told)
        body, asked = talk, chat_meaning(talk)
    else:
        plain = CompletionRequest(model="m", prompt=[*prompts], logprobs=logprobs, **fields)
        body, asked = plain, completion_meaning(plain)
    limits = Limits(CONTEXT, CONTEXT, CONTEXT)
    admitted = admit(body, asked, prompts, Defaults("m", ends), limits, request_id, trace, grammar, salt=salt)
    for request in admitted:
        sent = request_to_wire(request).SerializeToString()
        heard = request_from_wire(inference_pb2.InferenceRequest.FromString(sent))
        assert heard == request
        ModelBounds(VOCABULARY, CONTEXT).check(heard)
