"""Random protobuf messages of the kinds that a peer could send: any field set or not, with any value.

`likely` gives meaningful values for a field, by "name" or by "Message.name". Half of the messages use these
values alone, so that they pass the first checks. In the others any field may be missing or invalid."""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)
Likely = Mapping[str, st.SearchStrategy[Any]]

MEGABYTE: Final = 1 << 20
_PLAIN: Final = st.characters(exclude_categories=["Cs"])


def unsigned(bits: int) -> st.SearchStrategy[int]:
    edges = [0, 1, 2, 3, 5, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2**bits - 1]
    return st.sampled_from(edges) | st.integers(0, 2**bits - 1)


def signed(bits: int) -> st.SearchStrategy[int]:
    edge = 2 ** (bits - 1)
    return st.sampled_from([0, 1, -1, edge - 1, -edge]) | st.integers(-edge, edge - 1)


TEXTS: Final = st.text(_PLAIN, max_size=24) | st.sampled_from(
    ["", "\0", "\n", "x" * 300, "127.0.0.1:1", "\U0010ffff", "%s{}", "y" * MEGABYTE]
)
BYTES: Final = st.binary(max_size=64) | st.sampled_from([b"", b"\0", b"\0" * 300, b"\0" * MEGABYTE])

_SCALARS: Final[Mapping[int, st.SearchStrategy[Any]]] = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_BYTES: BYTES,
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_ENUM: st.integers(-1, 4) | signed(32),
    FieldDescriptor.TYPE_FIXED64: unsigned(64),
    FieldDescriptor.TYPE_INT64: signed(64),
    FieldDescriptor.TYPE_SINT32: signed(32),
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_UINT32: unsigned(32),
    FieldDescriptor.TYPE_UINT64: unsigned(64),
}


def _is_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and bool(kind.GetOptions().map_entry)


def _owner(field: FieldDescriptor) -> str:
    return "" if field.containing_type is None else field.containing_type.name


def _value(field: FieldDescriptor, likely: Likely, whole: bool) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return _message(field.message_type, likely, whole)
    return _SCALARS[field.type]


def _field(field: FieldDescriptor, likely: Likely, whole: bool) -> st.SearchStrategy[Any]:
    plausible = likely.get(f"{_owner(field)}.{field.name}", likely.get(field.name))
    if plausible is not None and whole:
        return plausible
    if _is_map(field):
        entry: Any = field.message_type
        key, value = (_value(entry.fields_by_name[name], likely, whole) for name in ("key", "value"))
        anything: st.SearchStrategy[Any] = st.dictionaries(key, value, max_size=4)
    elif field.is_repeated:
        anything = st.lists(_value(field, likely, whole), max_size=4)
    else:
        anything = _value(field, likely, whole)
    if plausible is None:
        return anything
    return st.integers(0, 9).flatmap(lambda spoilt: anything if spoilt == 9 else plausible)


@st.composite
def _message(draw: st.DrawFn, descriptor: Descriptor, likely: Likely, whole: bool) -> Any:
    message = GetMessageClass(descriptor)()
    free = [field for field in descriptor.fields if field.containing_oneof is None]
    chosen = [draw(st.sampled_from(list(choice.fields))) for choice in descriptor.oneofs]
    for field in (*free, *chosen):
        if not whole and draw(st.integers(0, 9)) == 9:
            continue
        value = draw(_field(field, likely, whole))
        if _is_map(field):
            getattr(message, field.name).update(value)
        elif field.is_repeated:
            getattr(message, field.name).extend(value)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(value)
        else:
            setattr(message, field.name, value)
    return message


def messages(kind: type[M], likely: Likely | None = None) -> st.SearchStrategy[M]:
    """Messages of `kind`, as they arrive: serialised, now and then with fields that nobody knows."""

    def arrived(drawn: tuple[Message, bytes]) -> M:
        return kind.FromString(drawn[0].SerializeToString() + drawn[1])

    unknown = st.sampled_from([b""] * 8 + [b"\xf8\x07\x01", b"\xfa\x07\x02ab"])
    descriptor: Any = kind.DESCRIPTOR
    drawn = st.booleans().flatmap(lambda whole: _message(descriptor, likely or {}, whole))
    return st.tuples(drawn, unknown).map(arrived)


def computable(vocabulary: int) -> Likely:
    """Return values for the fields of an `InferenceRequest` that a model with this vocabulary can compute."""
    tokens = st.integers(0, vocabulary - 1)
    return {
        "request_id": st.just(""),
        "prompt": st.lists(tokens, min_size=1, max_size=20),
        "output": st.just([]) | st.lists(tokens, max_size=3),
        "max_tokens": st.integers(4, 40),
        "min_tokens": st.just(0),
        "eos_token_ids": st.just([]),
        "stop_token_ids": st.just([]),
        "temperature": st.just(0.0),
        "top_p": st.just(1.0),
        "min_p": st.just(0.0),
        "repetition_penalty": st.just(1.0),
        "presence_penalty": st.just(0.0),
        "frequency_penalty": st.just(0.0),
        "logit_bias": st.just({}),
        "top_logprobs": st.integers(0, 20),
        "logprob_token_ids": st.lists(tokens, max_size=3),
        "prompt_logprobs": st.integers(0, 4),
    }
