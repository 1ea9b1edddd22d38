"""Tests of the behaviours that vLLM's and SGLang's own tests assert: each holds here, or is refused by name.

`--rewrite` writes the page of it anew.
"""

from collections import Counter

import pytest

from tests.api.behaviours import page
from tests.api.behaviours.sending import MESSAGES, Behaviour, Refused, send
from tests.api.behaviours.table import GROUPS, is_right
from tests.api.requests.test_bad_input import check

ROWS = [(f"{group}: {row.claim}, {row.path}", row) for group, rows in GROUPS.items() for row in rows]


@pytest.mark.parametrize("row", [pytest.param(row, id=name.replace("/", " ")) for name, row in ROWS])
async def test_what_the_peers_assert_is_so_or_refused_by_name(row: Behaviour) -> None:
    reply, answer = await send(row)
    match row.expected:
        case Refused(param, status) if row.path.startswith(MESSAGES):
            assert answer.status == status, reply.text
            assert set(answer.body) >= {"type", "error"}
            assert param is None or param in answer.body["error"]["message"]
            assert answer.requests == []
        case Refused(param, status):
            check(reply, status, param)
            assert answer.requests == []
        case expected:
            assert answer.status == 200, reply.text
            assert expected(answer), reply.text


def test_each_behaviour_is_told_once() -> None:
    assert [name for name, times in Counter(name for name, _ in ROWS).items() if times > 1] == []


def test_most_are_right_and_all_others_have_a_reason() -> None:
    assert sum(is_right(row) for _, row in ROWS) >= 300
    assert all(row.expected.why for _, row in ROWS if isinstance(row.expected, Refused))


def test_the_page_says_what_is_asked_here(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite"):
        page.PAGE.write_text(page.rendered(), encoding="utf-8")
    assert page.PAGE.read_text(encoding="utf-8") == page.rendered(), (
        "pytest tests/api/test_behaviours.py --rewrite"
    )
