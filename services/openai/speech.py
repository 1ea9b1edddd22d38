"""Which of a model's text is its answer, which a thought, and which the call of a tool?

A model writes all of it into one text, between marks of its own (`dialects`). This is a fold over that text:
how it was cut into pieces changes nothing. A call is told when it is whole and can be read, so that what is
told of it is never broken; one that cannot be read stays the text that it was. One that a grammar holds is
told as it grows, where that is asked for: it cannot be broken, but cut off.

Pure.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any, Final, NamedTuple, Protocol

from services.openai.held_reading import CallShape, HeldCall

Schemas = Mapping[str, Mapping[str, Any]]
"""Of each tool that may be called: the JSON schema of its arguments."""


class Said(NamedTuple):
    """Of the answer."""

    text: str


class Thought(NamedTuple):
    text: str


class Call(NamedTuple):
    """Of a tool."""

    name: str
    arguments: str
    """A JSON object."""


class CallBegun(NamedTuple):
    """Of a tool; its arguments follow."""

    name: str


class CallGrown(NamedTuple):
    """The call that was begun last."""

    arguments: str
    """What comes to its JSON."""


Part = Said | Thought | Call | CallBegun | CallGrown


class RegionKind(Enum):
    """What stands between two marks."""

    THOUGHT = "thought"
    CALLS = "calls"
    SAID = "said"


class Unreadable(ValueError):
    """A text between the marks of a call is none."""


Read = Callable[[str, str, Schemas], Sequence[Call]]
"""The calls in a body, behind its head. Raises Unreadable."""


def _no_calls(_: str, body: str, __: Schemas) -> Sequence[Call]:
    raise Unreadable(body)


@dataclass(frozen=True, slots=True)
class TextRegion:
    """A part of the text between marks."""

    kind: RegionKind
    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    """None: it lasts to the end of the text."""
    until: tuple[str, ...] = ()
    """Marks that end it and belong to what follows."""
    head: str = ""
    """The mark that ends what stands before the body, if anything does."""
    sort: Callable[[str], RegionKind] | None = None
    """What a head makes of it."""
    bare: bool = False
    """Its mark is its first character, and counts where nothing was said before it alone."""
    read: Read = _no_calls
    whole: Callable[[str], bool] = lambda _: True
    """Whether a body may be whole that nothing closed."""

    def calls(self, head: str, body: str, schemas: Schemas, *, closed: bool) -> Sequence[Call]:
        """Raises Unreadable."""
        if not closed and not self.whole(body):
            raise Unreadable(body)
        return self.read(head, body, schemas)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model marks its thoughts and its calls."""

    regions: tuple[TextRegion, ...] = ()
    drops: tuple[str, ...] = ()
    """Marks that say nothing."""
    inner: tuple[str, ...] = ()
    """Marks within bodies, for those who read them."""

    @property
    def marks(self) -> frozenset[str]:
        """All that it is told by."""
        return frozenset(
            mark
            for region in self.regions
            for mark in (*region.opens, *region.closes, *region.until, region.head)
            if mark
        ).union(self.drops, self.inner)

    def only(self, *kinds: RegionKind) -> "Dialect":
        """Without the regions of other kinds; what has a head may be of any."""
        return Dialect(
            tuple(each for each in self.regions if each.kind in kinds or each.sort is not None),
            self.drops,
            self.inner,
        )

    def __or__(self, other: "Dialect") -> "Dialect":
        return Dialect(
            tuple(dict.fromkeys(self.regions + other.regions)),
            tuple(dict.fromkeys(self.drops + other.drops)),
            tuple(dict.fromkeys(self.inner + other.inner)),
        )


class Voice(Protocol):
    """What hears one answer."""

    unread: int
    """Calls that could not be read, and are text."""

    @property
    def thinking(self) -> bool:
        """Whether what comes next is a thought, as far as it is known."""

    def push(self, text: str) -> list[Part]:
        """What is certain with the next piece of the text."""

    def flush(self) -> list[Part]:
        """What was held back. The end."""


NO_GAP: Final = ""


@dataclass(slots=True)
class _Open:
    """A region that has begun."""

    region: TextRegion
    kind: RegionKind
    mark: str
    head: list[str] = field(default_factory=list)
    in_head: bool = False
    body: list[str] = field(default_factory=list)
    call: HeldCall | None = None
    """That is being written as a grammar has it."""
    told: bool = False
    """What is in it was told, or has begun to be."""
    arguments: list[str] = field(default_factory=list)


class Speech:
    """One answer in a dialect. Whitespace around thoughts and calls is layout, and belongs to nothing."""

    def __init__(
        self,
        dialect: Dialect,
        schemas: Schemas,
        *,
        thinking: bool = False,
        held: CallShape | None = None,
        grows: bool = False,
    ) -> None:
        """`thinking`: the prompt has opened a thought already. `held`: as what a grammar has calls written.
        `grows`: those are told as they come."""
        self._dialect = dialect
        self._shape = held
        self._grows = grows
        self._schemas = schemas
        self._calls_come = any(each.kind is RegionKind.CALLS or each.sort for each in dialect.regions)
        self._held = ""
        self._gap = NO_GAP
        """Whitespace that is said if something follows it."""
        self._fresh = False
        """Behind a thought or a call: whitespace is layout."""
        self._begun = False
        """Something was said or called."""
        self._open: _Open | None = None
        self.unread = 0
        thoughts = [each for each in dialect.regions if each.kind is RegionKind.THOUGHT]
        if thinking and thoughts:
            self._open = _Open(thoughts[0], RegionKind.THOUGHT, "")
            self._fresh = True

    @property
    def thinking(self) -> bool:
        return self._open is not None and self._open.kind is RegionKind.THOUGHT

    def push(self, text: str) -> list[Part]:
        self._held += text
        return self._advance(last=False)

    def flush(self) -> list[Part]:
        parts = self._advance(last=True)
        if self._open is not None and self._open.call is not None and not self._open.told:
            self._read_as_any(self._open)
            parts += self._advance(last=True)
        if self._open is not None:
            self._close(parts, "")
        if self._gap and not self._fresh:
            parts.append(Said(self._gap))
        self._gap = NO_GAP
        return joined(parts)

    def _advance(self, *, last: bool) -> list[Part]:
        parts: list[Part] = []
        while self._held:
            if self._open is None and self._opens_bare(last=last):
                break
            if self._open is not None and self._open.call is not None:
                self._grow(parts, self._open, self._open.call)
                continue
            start, mark = _first(self._held, self._marks(), last=last)
            self._pass(parts, self._held[:start])
            self._held = self._held[start:]
            if mark is None:
                break
            self._meet(parts, mark)
        return joined(parts)

    def _opens_bare(self, *, last: bool) -> bool:
        """Whether nothing can be told yet, because a region may begin that has no mark of its own."""
        if self._begun:
            return False
        bare = [each for each in self._dialect.regions if each.bare]
        if not bare:
            return False
        said = (self._gap + self._held).lstrip()
        if not said:
            return not last
        for region in bare:
            if said.startswith(region.opens):
                self._begun, self._gap, self._held = True, NO_GAP, said
                self._open = _Open(region, region.kind, "", call=self._held_call(""))
                return False
        return False

    def _marks(self) -> tuple[str, ...]:
        """That mean something where the text is now."""
        now = self._open
        if now is None:
            opens = (mark for each in self._dialect.regions if not each.bare for mark in each.opens)
            return (*opens, *self._dialect.drops)
        if now.in_head:
            return (now.region.head,)
        own = now.region.opens if now.kind is RegionKind.THOUGHT and not now.region.head else ()
        return (*now.region.closes, *now.region.until, *own)

    def _meet(self, parts: list[Part], mark: str) -> None:
        """A mark is at the beginning of what is held."""
        now = self._open
        if now is None:
            self._held = self._held[len(mark) :]
            for region in self._dialect.regions:
                if not region.bare and mark in region.opens:
                    call = self._held_call(mark) if region.kind is RegionKind.CALLS else None
                    self._open = _Open(region, region.kind, mark, in_head=bool(region.head), call=call)
                    self._begin(region.kind)
                    return
            return
        if now.in_head:
            self._held = self._held[len(mark) :]
            now.in_head = False
            if now.region.sort is not None:
                now.kind = now.region.sort(now.mark + "".join(now.head))
            self._begin(now.kind)
            if now.kind is RegionKind.CALLS and self._shape is not None and self._shape.mark == mark:
                now.call = self._named_by(now)
            return
        if mark in now.region.closes:
            self._held = self._held[len(mark) :]
            self._close(parts, mark)
        elif mark in now.region.until:
            self._close(parts, "")
        else:
            self._held = self._held[len(mark) :]  # a thought that is opened again

    def _held_call(self, mark: str) -> HeldCall | None:
        shape = self._shape
        return shape.of_any(self._schemas) if shape is not None and shape.mark == mark else None

    def _named_by(self, now: _Open) -> HeldCall | None:
        """A call whose name stands in its head."""
        try:
            (call,) = now.region.read(now.mark + "".join(now.head), "{}", self._schemas)
        except Unreadable:
            return None
        return HeldCall({"": call.name}, "")

    def _grow(self, parts: list[Part], now: _Open, call: HeldCall) -> None:
        """What comes is of a call that a grammar holds."""
        begun = call.name is not None
        taken, arguments = call.take(self._held)
        now.body.append(self._held[:taken])
        self._held = self._held[taken:]
        if call.is_none:
            self._read_as_any(now)
            return
        if self._grows and call.name is not None and not begun:
            now.told = True
            parts.append(CallBegun(call.name))
        if arguments and self._grows:
            parts.append(CallGrown(arguments))
        now.arguments.append(arguments)
        if call.arguments_end and not now.told:
            written = "".join(now.arguments)
            if call.name is None or not _is_json(written):
                self._read_as_any(now)
                return
            now.told = True
            parts.append(Call(call.name, written))
        if now.region.closes and call.arguments_end:
            now.call = None
        elif call.ends:
            self._open, self._begun, self._fresh, self._gap = None, False, True, NO_GAP

    def _read_as_any(self, now: _Open) -> None:
        """As what nobody holds to anything."""
        self._held = "".join(now.body) + self._held
        now.body.clear()
        now.call = None

    def _begin(self, kind: RegionKind) -> None:
        if kind is RegionKind.THOUGHT:
            self._fresh, self._gap = True, NO_GAP

    def _pass(self, parts: list[Part], text: str) -> None:
        """Text that is no mark."""
        if not text:
            return
        now = self._open
        if now is None:
            self._say(parts, text, Said)
        elif now.in_head:
            now.head.append(text)
        elif now.kind is RegionKind.CALLS:
            now.body.append(text)
        else:
            self._say(parts, text, Thought if now.kind is RegionKind.THOUGHT else Said)

    def _say(self, parts: list[Part], text: str, part: type[Said] | type[Thought]) -> None:
        """Leading whitespace of what is fresh is dropped, trailing held back until it is known not to be."""
        if self._fresh:
            text = text.lstrip()
            if not text:
                return
            self._fresh = False
        text = self._gap + text
        self._gap = NO_GAP
        if part is Thought or self._calls_come:
            kept = text.rstrip()
            self._gap, text = text[len(kept) :], kept
        if text:
            self._begun = self._begun or part is Said
            parts.append(part(text))

    def _close(self, parts: list[Part], mark: str) -> None:
        """The region that is open ends; `mark` is what ended it, "" the end or another region."""
        now = self._open
        assert now is not None
        self._open = None
        if now.in_head:
            return  # a head alone says nothing
        self._begin(now.kind)
        if now.kind is not RegionKind.CALLS:
            return
        if now.told:
            self._begun, self._fresh, self._gap = True, True, NO_GAP
            return
        head, body = now.mark + "".join(now.head), "".join(now.body)
        try:
            calls = now.region.calls(head, body, self._schemas, closed=bool(mark))
        except Unreadable:
            self.unread += 1
            self._say(parts, head + now.region.head + body + mark, Said)
            return
        self._begun, self._fresh, self._gap = True, True, NO_GAP
        parts += calls


def _first(text: str, marks: Sequence[str], *, last: bool) -> tuple[int, str | None]:
    """Where the first mark stands, of several there the longest; or from where one may begin, and None.
    `last`: nothing follows."""
    claimed = len(text) if last else min((_begun_from(text, mark) for mark in marks), default=len(text))
    found = min(
        ((at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0), default=(claimed, 0, "")
    )
    return (found[0], found[2]) if found[2] and found[0] < claimed else (claimed, None)


def _begun_from(text: str, mark: str) -> int:
    """Where the longest end of `text` begins that is a beginning of `mark`, and not all of it."""
    at = max(0, len(text) - len(mark) + 1)
    while (at := text.find(mark[0], at)) >= 0:
        if mark.startswith(text[at:]):
            return at
        at += 1
    return len(text)


def _is_json(text: str) -> bool:
    """That can be passed on: halves of characters cannot."""
    try:
        json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


_JOINED: Final[Mapping[type[Part], Callable[[str], Part]]] = {
    Said: Said,
    Thought: Thought,
    CallGrown: CallGrown,
}


def joined(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind are one part."""
    joined: list[Part] = []
    for kind, alike in groupby(parts, type):
        if (made := _JOINED.get(kind)) is not None:
            joined.append(made("".join(part[0] for part in alike)))
        else:
            joined += alike
    return joined
