"""Stop strings cut at the same place however the text arrives, and hold back no more than they must."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.text.stop_strings import StopStrings

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=5)


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Find the stop string character by character: the first end at which one is complete, and the longest of
    those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("abc", max_size=5), max_size=10), STOPS, st.booleans())
def test_the_cut_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str], include: bool) -> None:
    strings = StopStrings(stops, include=include)
    sent = ""
    for piece in pieces:
        sent += strings.push(piece)
        if strings.matched is not None:
            break
    else:
        sent += strings.flush()
    assert (sent, strings.matched) == oracle("".join(pieces), stops, include)


@settings(max_examples=300, deadline=None)
@given(TEXT, STOPS)
def test_held_back_text_could_still_become_a_stop_string(text: str, stops: list[str]) -> None:
    strings = StopStrings(stops, include=False)
    sent = strings.push(text)
    if strings.matched is None:
        held = strings.flush()
        assert sent + held == text
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        for longer in range(len(held) + 1, len(text) + 1):
            assert not any(stop.startswith(text[-longer:]) for stop in stops)


def test_a_stop_string_over_many_pieces() -> None:
    strings = StopStrings(["</answer>"], include=False)
    assert [strings.push(piece) for piece in ("42", "<", "/b", "<", "/ans", "wer", ">tail")] == [
        "42", "", "</b", "", "", "", "",
    ]  # fmt: skip
    assert strings.matched == "</answer>"


def test_unarmed_text_may_hold_the_beginning_of_a_stop_string_but_not_its_end() -> None:
    strings = StopStrings(["ab"], include=False)
    assert strings.push("xab", armed=False) == "xab"
    assert strings.push("ya", armed=False) == "y"
    assert strings.push("b", armed=True) == ""
    assert strings.matched == "ab"
