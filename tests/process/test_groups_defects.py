"""The defects of rank groups that the field reports, replayed on real processes with real gloo between them.

Each rank is started by hand, as on several hosts, with hooks (`hooks.py`) that do something to one rank.
Beside each defect stands what its rule protects from: the same with the rule switched off. The mutants
`gate_before_agree`, `failure_is_agreed`, `each_admits_what_it_has`, `later_ranks_keep_what_fails` and
`rosters_are_not_compared` (`tests/mutants`) show the same in the core.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.runtime.errors import EXIT_GROUP
from tests.idle import POLL_S
from tests.models.eight_heads import VOCABULARY, eight_heads
from tests.process.by_hand import Group, Hand, by_hand
from tests.process.hooks import TOLD
from tests.process.load import Answer, any_prompts
from tests.process.stack import SPLIT
from tests.support.shared import Shared

SOON_S = 30.0
STREAM_TOKENS = 400
CHUNK_TOKENS = 16
SAMPLES = 20

TRANSFER_QUEUE = "baton_decode_transfer_queue_requests"
RUNNING = "baton_decode_running_requests"
BOOTSTRAP_QUEUE = "baton_prefill_bootstrap_queue_requests"


@pytest.fixture(scope="module")
def small(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eight_heads(tmp_path_factory.mktemp("eight-heads"), demo_model_dir)


# ---- metadata that lands on one rank long before the other; and rosters that differ


@pytest.fixture(scope="module")
def of_tensors(small: Path) -> Iterator[Shared[Hand]]:
    """A stack of two tensor-parallel ranks on each side. The bootstrap waits long for a worker that is being
    restarted."""
    with Shared(lambda: by_hand(small, {"tp": "2"}, {"tp": "2", **SPLIT})) as shared:
        yield shared


@pytest.fixture
def tensors(of_tensors: Shared[Hand], request: pytest.FixtureRequest) -> Hand:
    return of_tensors.lend(request.node)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("late", [0, 1], ids=["rank-0-late", "rank-1-late"])
def test_gate_before_agree_no_rank_admits_while_another_has_no_seal(tensors: Hand, late: int) -> None:
    """One rank of the receiver has pages and seal, and the other has its pages only."""
    [prompt] = any_prompts([70], VOCABULARY)
    want = tensors.ids(prompt)
    start = tensors.stack.idle_gauges()
    sender = tensors.prefill.folder(0)
    sender.say("late_seal", str(late))
    with tensors.asking(prompt) as answer:
        tensors.prefill.wait_said(0, "late_seal.held", SOON_S)
        tensors.wait_event(answer, "landed", SOON_S)  # each rank tells what it sees itself
        tensors.wait_event(answer, "voted", SOON_S)
        for _ in range(SAMPLES):
            assert tensors.decode.gauge(TRANSFER_QUEUE) == [1, 1]
            assert tensors.decode.gauge(RUNNING) == [0, 0]
            time.sleep(POLL_S)
        [room] = tensors.rooms(answer.request_id)
        early = room["decode"] if late == 1 else f"{room['decode']}/1"
        told = [(each["source"], each["name"]) for each in room["events"]]
        assert [source for source, name in told if name == "landed"] == [early]
        votes = [
            each["detail"] for each in room["events"] if (each["source"], each["name"]) == (early, "voted")
        ]
        assert "to go on from transferring; another rank does not yet" in votes
        assert "admitted" not in [name for _, name in told]
        assert sender.asked("late_seal.held") is not None, "all that was seen while the seal was held"
        sender.withdraw("late_seal")
    assert answer.ids == want
    [room] = tensors.rooms(answer.request_id)
    turns = [[turn for effect, turn in moves if effect == "admit"] for moves in _moves(tensors, room)]
    assert len(turns[0]) == 1, turns
    assert turns[0] == turns[1], "all admit in one turn"
    tensors.stack.wait_idle(start)


@pytest.mark.timeout(300)
def test_a_rank_that_admits_on_its_own_evidence_is_found_out_in_the_next_turn(tensors: Hand) -> None:
    """One rank has the old defect. The others stop instead of waiting for a step that it never joins."""
    [prompt] = any_prompts([70], VOCABULARY)
    want = tensors.ids(prompt)
    tensors.stack.idle_gauges()
    tensors.prefill.folder(0).say("late_seal", "1")
    tensors.decode.folder(0).say("own_evidence")
    with tensors.asking(prompt) as answer:
        assert tensors.decode.wait_ended() == [EXIT_GROUP, EXIT_GROUP], tensors.stack.tails()
        early, waiting = _moves(tensors, tensors.rooms(answer.request_id)[0])
        [admitted] = [turn for effect, turn in early if effect == "admit"]
        assert "admit" not in [effect for effect, _ in waiting]
        _check_told(tensors.decode, turn=admitted + 1)
        tensors.prefill.folder(0).withdraw("late_seal")
        tensors.start(tensors.decode)
    _check_went_on(tensors, answer, want)


@pytest.mark.all_groups
@pytest.mark.timeout(300)
def test_without_the_comparison_of_rosters_a_rank_that_admits_on_its_own_evidence_hangs_its_group(
    tensors: Hand,
) -> None:
    """This is the whole field defect: one rank computes, and waits for another that does not know of the
    step."""
    _end(tensors.decode)
    tensors.start(tensors.decode, "blind")
    [prompt] = any_prompts([70], VOCABULARY)
    want = tensors.ids(prompt)
    tensors.stack.idle_gauges()
    tensors.prefill.folder(0).say("late_seal", "1")
    tensors.decode.folder(0).say("own_evidence")
    with tensors.asking(prompt) as answer:
        tensors.decode.wait_gauge(RUNNING, [1, 0], SOON_S)
        for _ in range(SAMPLES):
            assert tensors.decode.gauge(RUNNING) == [1, 0]
            assert len(answer.ids) <= 1, "but for the first, which prefill drew"
            time.sleep(POLL_S)
        _end(tensors.decode)
        tensors.prefill.folder(0).withdraw("late_seal")
        tensors.start(tensors.decode)
    _check_went_on(tensors, answer, want)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("side", ["decode", pytest.param("prefill", marks=pytest.mark.all_groups)])
def test_divergence_detected_a_room_that_one_rank_alone_holds_ends_the_group_within_its_turn(
    tensors: Hand, side: str
) -> None:
    """Both ranks report which rooms each holds. The worker comes back and the stream goes on."""
    group = tensors.decode if side == "decode" else tensors.prefill
    [prompt] = any_prompts([70], VOCABULARY)
    want = tensors.ids(prompt, STREAM_TOKENS)
    if side == "prefill":
        tensors.prefill.folder(0).say("late_seal", "0")
    with tensors.asking(prompt, STREAM_TOKENS) as answer:
        if side == "prefill":
            tensors.prefill.wait_said(0, "late_seal.held", SOON_S)
        answer.wait_ids(1)
        group.folder(1).say("stray_room")
        assert group.wait_ended() == [EXIT_GROUP, EXIT_GROUP], tensors.stack.tails()
        _check_told(group, turn=int(group.wait_said(1, "stray_room.done", 0.0)))
        tensors.start(group)
    _check_went_on(tensors, answer, want)
    first = tensors.rooms(answer.request_id)[0]
    assert first["cause"]["reason"] == "group_broken", first
    assert "different rooms" in first["cause"]["text"], first


# ---- an abort that one rank of a pipeline sees


@pytest.fixture(scope="module")
def of_pipelines(small: Path) -> Iterator[Shared[Hand]]:
    """A stack of three pipeline stages on prefill and one rank on decode."""
    stages = {"pp": "3", "chunk_tokens": str(CHUNK_TOKENS)}
    with Shared(lambda: by_hand(small, stages, SPLIT)) as shared:
        yield shared


@pytest.fixture
def pipeline(of_pipelines: Shared[Hand], request: pytest.FixtureRequest) -> Hand:
    return of_pipelines.lend(request.node)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 2], ids=["first-stage", "last-stage"])
@pytest.mark.parametrize("where", ["waiting", "computing"])
def test_failure_is_agreed_an_abort_that_one_stage_sees_is_drained_by_all(
    pipeline: Hand, rank: int, where: str
) -> None:
    """The client is answered all the same, from a second room."""
    [prompt] = any_prompts([200], VOCABULARY)
    want = pipeline.ids(prompt)
    start = pipeline.stack.idle_gauges()
    stage, leader = pipeline.prefill.folder(rank), pipeline.decode.folder(0)
    if where == "waiting":
        leader.say("lost_grants")
    else:
        stage.say("fail_alone", where)
    with pipeline.asking(prompt) as answer:
        if where == "waiting":
            pipeline.decode.wait_said(0, "lost_grants.done", SOON_S)
            pipeline.prefill.wait_gauge(BOOTSTRAP_QUEUE, [1, 1, 1], SOON_S)
            leader.withdraw("lost_grants")
            stage.say("fail_alone", where)
        failed = pipeline.prefill.wait_said(rank, "fail_alone.done", SOON_S)
    stage.withdraw("fail_alone.done")
    leader.withdraw("lost_grants.done")
    assert (answer.ids, answer.error) == (want, None)
    first, second = pipeline.rooms(answer.request_id)
    assert (first["id"], second["retry_of"]) == (failed, failed)
    assert first["cause"]["reason"] == "transfer_failed"
    told = [event["detail"] for event in first["events"] if event["name"] == "failed"]
    assert any("transfer_failed" in each for each in told), told
    assert TOLD in first["cause"]["text"], "in the words of the stage that saw it"
    moves = [pipeline.prefill.moves(each, int(failed)) for each in range(3)]
    assert moves[0] == moves[1] == moves[2], "the same moves in the same turns"
    assert [effect for effect, _ in moves[0]][-2:] == ["fence", "release"]
    pipeline.prefill.wait_gauge(BOOTSTRAP_QUEUE, [0, 0, 0], SOON_S)
    pipeline.stack.wait_idle(start)


@pytest.mark.all_groups
@pytest.mark.timeout(300)
def test_a_stage_that_drops_an_aborted_room_by_itself_leaves_it_in_the_queue_of_the_others(
    pipeline: Hand,
) -> None:
    """The field's defect, with the rules switched off that are against it: the abort reaches the first stage
    alone, which acts on it alone, and nobody compares what the stages hold. The gauge never returns to 0."""
    _end(pipeline.prefill)
    pipeline.start(pipeline.prefill, "blind", "drops_alone", followers=("deaf",))
    [prompt] = any_prompts([200], VOCABULARY)
    pipeline.decode.folder(0).say("lost_grants")
    with pipeline.asking(prompt) as answer:
        pipeline.prefill.wait_gauge(BOOTSTRAP_QUEUE, [1, 1, 1], SOON_S)
        pipeline.prefill.folder(0).say("fail_alone", "waiting")
        pipeline.prefill.wait_said(0, "fail_alone.done", SOON_S)
        pipeline.prefill.wait_gauge(BOOTSTRAP_QUEUE, [1, 2, 2], SOON_S)  # with the request's second room
        pipeline.cancel(pipeline.rooms(answer.request_id)[-1])
    assert answer.error is not None
    pipeline.prefill.wait_gauge(BOOTSTRAP_QUEUE, [0, 2, 2], SOON_S)
    for _ in range(SAMPLES):
        assert pipeline.prefill.gauge(BOOTSTRAP_QUEUE) == [0, 2, 2], "nothing is left that could end them"
        time.sleep(POLL_S)


# ---- how


def _end(group: Group) -> None:
    """End the process as a power failure does."""
    for service in group.ranks:
        service.kill()


def _moves(hand: Hand, room: dict[str, Any]) -> list[list[tuple[str, int]]]:
    return [hand.decode.moves(rank, int(room["id"])) for rank in range(hand.decode.world)]


def _check_told(group: Group, turn: int) -> None:
    """Check that every rank's last log line names the turn, and both digests with the ranks that hold
    each."""
    for service in group.ranks:
        said = service.tail(400)
        found = re.search(r"turn (\d+): ranks hold different rooms \(digests 0x\w+ to 0x\w+\)", said)
        assert found, said
        assert int(found[1]) == turn
        held = dict(re.findall(rf"rank (\d): turn {turn}, digest (0x\w+)", said))
        assert held.keys() == {"0", "1"}, said
        assert held["0"] != held["1"]


def _check_went_on(hand: Hand, answer: Answer, want: list[int]) -> None:
    assert (answer.ids, answer.error) == (want, None)
    causes = [room["cause"] for room in hand.rooms(answer.request_id)]
    assert causes[0] is not None
    assert causes[-1] is None
