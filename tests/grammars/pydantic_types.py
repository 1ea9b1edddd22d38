"""Types of pydantic and Python that describe answers, with an answer for each."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, NotRequired, TypeVar
from uuid import UUID

from pydantic import (
    UUID4,
    AnyUrl,
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    HttpUrl,
    IPvAnyAddress,
    Json,
    PostgresDsn,
    RootModel,
    SecretStr,
)
from typing_extensions import TypedDict

T = TypeVar("T")


class Color(Enum):
    RED = "red"
    GREEN = "green"


class Size(IntEnum):
    SMALL = 1
    LARGE = 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    """A dog."""

    kind: Literal["dog"]
    name: str = Field(title="Name", description="What it is called.", examples=["Rex"])


class Owner(BaseModel):
    pet: Cat
    other: Dog | None = None


class Node(BaseModel):
    name: str
    children: list["Node"] = []


class Linked(BaseModel):
    value: int
    next: "Linked | None" = None


class Typed(TypedDict):
    a: int
    b: NotRequired[str]


class Pair(NamedTuple):
    x: int
    y: str = "y"


@dataclass
class Data:
    a: int
    b: str = "x"


class Box(BaseModel, Generic[T]):
    item: T


class Numbers(RootModel[list[int]]):
    pass


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Aliased(BaseModel):
    a: int = Field(alias="theA")


LIKE_EMAIL = Annotated[str, Field(json_schema_extra={"format": "email"})]
SHORT = Annotated[str, Field(min_length=2, max_length=5)]
LETTERS = Annotated[str, Field(pattern="^[a-z]+$")]
PYDANTIC_TYPES: Final[Mapping[str, tuple[Any, Any]]] = {
    "str": (str, "a"),
    "int": (int, -3),
    "float": (float, 1.5),
    "bool": (bool, True),
    "None": (None, None),
    "bytes": (bytes, "abc"),
    "Any": (Any, {"a": [1]}),
    "int with bounds": (Annotated[int, Field(ge=1, lt=9)], 8),
    "int of 64 bits": (Annotated[int, Field(ge=-(2**63), le=2**63 - 1)], 5),
    "float of a multiple": (Annotated[float, Field(gt=0, multiple_of=0.5)], 1.5),
    "str with lengths": (SHORT, "abc"),
    "str with a pattern": (LETTERS, "abc"),
    "str as an e-mail": (LIKE_EMAIL, "ann@example.com"),
    "Decimal": (Decimal, "1.50"),
    "Decimal with places": (Annotated[Decimal, Field(max_digits=5, decimal_places=2)], "1.50"),
    "date": (date, "2024-02-29"),
    "datetime": (datetime, "2024-02-29T10:20:30Z"),
    "datetime with a zone": (AwareDatetime, "2024-02-29T10:20:30+01:00"),
    "time": (time, "10:20:30Z"),
    "timedelta": (timedelta, "P1DT2H"),
    "UUID": (UUID, "3fa85f64-5717-4562-b3fc-2c963f66afa6"),
    "UUID4": (UUID4, "3fa85f64-5717-4562-b3fc-2c963f66afa6"),
    "Path": (Path, "/tmp/a b"),
    "AnyUrl": (AnyUrl, "ftp://example.com/a"),
    "HttpUrl": (HttpUrl, "https://example.com/a"),
    "PostgresDsn": (PostgresDsn, "postgres://u:p@localhost:5432/db"),
    "IPv4Address": (IPv4Address, "10.0.0.1"),
    "IPv6Address": (IPv6Address, "::1"),
    "IPvAnyAddress": (IPvAnyAddress, "10.0.0.1"),
    "IPv4Network": (IPv4Network, "10.0.0.0/8"),
    "SecretStr": (SecretStr, "a secret"),
    "Json": (Json[list[int]], "[1, 2]"),
    "Base64Bytes": (Base64Bytes, "aGVsbG8="),
    "ByteSize": (ByteSize, 1024),
    "Pattern": (re.Pattern, "^a+$"),
    "Fraction": (Fraction, "1/3"),
    "Literal": (Literal["a", 1, None], "a"),
    "Enum": (Color, "red"),
    "IntEnum": (Size, 2),
    "Optional": (int | None, None),
    "Union": (int | str | list[bool], [True]),
    "discriminated union": (
        Annotated[Cat | Dog, Field(discriminator="kind")],
        {"kind": "dog", "name": "Rex"},
    ),
    "tuple": (tuple[int, str], [1, "a"]),
    "tuple of any length": (tuple[int, ...], [1, 2, 3]),
    "empty tuple": (tuple[()], []),
    "list": (list[int], [1, 2]),
    "list with lengths": (
        Annotated[list[Cat], Field(min_length=1, max_length=2)],
        [{"kind": "cat", "lives": 9}],
    ),
    "Sequence": (Sequence[float], [1, 2.5]),
    "set": (set[int], [1, 2]),
    "frozenset": (frozenset[str], ["a"]),
    "set of at most one": (Annotated[set[int], Field(max_length=1)], [1]),
    "dict": (dict[str, int], {"a": 1}),
    "dict with lengths": (Annotated[dict[str, int], Field(min_length=1, max_length=2)], {"a": 1}),
    "dict by int": (dict[int, str], {"1": "a"}),
    "dict by Enum": (dict[Color, int], {"red": 1}),
    "dict by Literal": (dict[Literal["a", "b"], int], {"b": 1}),
    "dict by UUID": (dict[UUID, int], {"3fa85f64-5717-4562-b3fc-2c963f66afa6": 1}),
    "dict by date": (dict[date, int], {"2024-02-28": 1}),
    "dict by a pattern": (dict[LETTERS, int], {"abc": 1}),
    "dict by lengths": (dict[SHORT, int], {"abc": 1}),
    "defaultdict": (defaultdict[str, list[int]], {"a": [1]}),
    "model in another": (Owner, {"pet": {"kind": "cat", "lives": 9}, "other": None}),
    "recursive model": (Node, {"name": "a", "children": [{"name": "b", "children": []}]}),
    "linked model": (Linked, {"value": 1, "next": {"value": 2, "next": None}}),
    "TypedDict": (Typed, {"a": 1}),
    "NamedTuple": (Pair, [1, "a"]),
    "dataclass": (Data, {"a": 1, "b": "c"}),
    "generic model": (Box[list[int]], {"item": [1]}),
    "RootModel": (Numbers, [1, 2]),
    "model without others": (Strict, {"a": 1}),
    "model with others": (Open, {"a": 1, "b": "c"}),
    "model with an alias": (Aliased, {"theA": 1}),
}
