"""Tests of the table of reasons, which says for each one what follows from it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from baton.fleet.retry import avoided_sides
from baton.rooms.errors import Reason
from baton.rooms.phases import Side
from baton.rooms.reasons import LOST, REASONS, Fault
from tests.rooms.pages import generated

ROOT: Final = Path(__file__).parents[2]
SERVICES: Final = ROOT / "services"
YES: Final = {True: "yes", False: "no"}


def test_every_reason_has_its_row_in_the_order_in_which_a_verdict_weighs_them() -> None:
    assert list(REASONS) == list(Reason)


def test_the_page_has_every_reason(rewrite: bool) -> None:
    rows = [
        f"| `{reason.value}` | {facts.fault.value} | {YES[facts.is_retried]} | {YES[facts.is_failure]} |"
        f" {YES[facts.is_counted]} | {facts.meaning} |"
        for reason, facts in REASONS.items()
    ]
    head = "| reason | whose doing | another room follows | a failure | counted | what it means |"
    generated("reasons", [head, "|---|---|---|---|---|---|", *rows], rewrite=rewrite)


def test_the_alerts_leave_out_what_callers_do_and_workers_that_leave() -> None:
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    [left_out] = re.findall(r'reason!~"([^"]+)"', alerts)
    theirs = [each for each, facts in REASONS.items() if facts.fault is Fault.CALLER and facts.is_counted]
    assert left_out.split("|") == [each.value for each in (*theirs, Reason.DRAINING)]
    for asked in re.findall(r'reason=~"([^"]+)"', alerts):
        assert all(Reason(each) in REASONS for each in asked.split("|"))


def test_no_other_source_sorts_reasons() -> None:
    """A set of reasons has to be a column of the table, not a literal in another file."""
    found = [
        f"{path.relative_to(SERVICES)}:{node.lineno}"
        for path in SERVICES.rglob("*.py")
        if path.name != "reasons.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Set | ast.Tuple | ast.List | ast.Dict) and len(list(named(node))) > 1
    ]
    assert found == []


def named(node: ast.Set | ast.Tuple | ast.List | ast.Dict) -> Iterator[str]:
    for each in node.keys if isinstance(node, ast.Dict) else node.elts:
        match each:
            case ast.Attribute(ast.Name("Reason"), name):
                yield name
            case _:
                pass


def test_what_is_no_failure_is_its_callers_doing_or_nobodys() -> None:
    assert {each for each, facts in REASONS.items() if not facts.is_failure} == {
        Reason.RETRACTED,
        Reason.LOCAL,
        Reason.WORKER_FULL,
        Reason.NOT_ADOPTED,
        Reason.ANSWERED,
        Reason.CLIENT_GONE,
    }
    assert {each for each, facts in REASONS.items() if facts.fault is Fault.CALLER} == {
        Reason.NOT_ADOPTED,
        Reason.ANSWERED,
        Reason.CLIENT_GONE,
        Reason.CANCELLED,
    }


def test_only_what_takes_nothing_from_a_client_is_not_counted() -> None:
    assert [each for each, facts in REASONS.items() if not facts.is_counted] == [
        Reason.RETRACTED,
        Reason.LOCAL,
        Reason.WORKER_FULL,
        Reason.NOT_ADOPTED,
        Reason.ANSWERED,
    ]


def test_what_is_nobodys_fault_is_no_failure_and_any_failure_of_the_same_turn_is_told_instead() -> None:
    """Ranks agree on the reason that is listed last. A room that one rank retracts and another one fails has
    failed."""
    nobodys = [each for each, facts in REASONS.items() if not facts.is_attempt]
    assert nobodys == [Reason.RETRACTED, Reason.LOCAL, Reason.WORKER_FULL] == list(Reason)[: len(nobodys)]
    assert not any(REASONS[each].is_failure or REASONS[each].is_counted for each in nobodys)
    assert [each for each in nobodys if REASONS[each].is_retried] == [Reason.RETRACTED, Reason.WORKER_FULL]


def test_a_room_goes_on_with_one_worker_only_where_that_computes_it_all() -> None:
    assert [each for each, facts in REASONS.items() if not facts.ends_room] == [Reason.LOCAL]


@pytest.mark.parametrize("side", list(Side))
def test_a_lost_worker_is_the_one_that_the_next_room_avoids(side: Side) -> None:
    assert avoided_sides(LOST[side], None) == {side}


def test_the_next_room_avoids_somebody_for_exactly_the_failures_that_are_retried() -> None:
    for reason, facts in REASONS.items():
        assert bool(avoided_sides(reason, None)) is (facts.is_retried and facts.is_attempt)
