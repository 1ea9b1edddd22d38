"""Tests of a worker's ranks when one refuses, crashes, is killed or stopped, or all have to leave."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.cli.main import serve_forked_commands
from baton.launch import exit_reports, rank_exits
from baton.launch.rank_processes import run_ranks
from baton.launch.shape_check import check_shape
from baton.prefill.settings import PrefillSettings
from baton.runtime.errors import EXIT_FAILED, StartupError
from baton.runtime.exit_file import ExitFile
from baton.runtime.listening_ports import bind_port, port_of, reserve_port
from baton.runtime.logging import TextFormatter
from baton.runtime.settings import load
from baton.wire.receiver_secret import digest_of
from tests.launch.ranks import Ranks
from tests.launch.stand_ins import PATIENCE_S, eventually, gone


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr(rank_exits, "GRACE_S", 0.3)
    return Ranks(tmp_path)


class Running:
    """A running group of three ranks."""

    def __init__(self, ranks: Ranks, **flags: Any) -> None:
        self.shutdown = asyncio.Event()
        self._group = ranks.group(**flags)
        self.served = asyncio.create_task(self._group.serve(self.shutdown))

    async def ends(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.served

    async def stop(self) -> int:
        self.shutdown.set()
        return await self.ends()


async def started(ranks: Ranks, shown: Callable[[], str]) -> None:
    """Wait until the launcher has seen the leader start, which it checks four times a second."""
    await ranks.up(3)
    await eventually(lambda: shown().count("turning") >= 3)
    await asyncio.sleep(0.5)


@pytest.fixture
def shown(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Return a function that returns all lines of the ranks so far, and the launcher's log lines."""
    lines: list[str] = []
    formatter = TextFormatter()

    def read() -> str:
        lines.append(capfd.readouterr().err)
        return "".join(lines) + "\n".join(formatter.format(each) for each in caplog.records)

    return read


async def test_a_rank_that_refuses_to_start_ends_the_worker_with_its_words_and_code(ranks: Ranks) -> None:
    ranks.behaviour |= {0: "never starts", 1: "refuses"}
    running = Running(ranks)
    with pytest.raises(StartupError, match=r"^rank 1: too little memory: lower --kv-cache-memory$") as ended:
        await running.ends()
    assert ended.value.exit_code == EXIT_FAILED
    assert len(ranks.pids) == 3
    assert all(gone(pid) for pid in ranks.pids)


async def test_the_rank_that_is_the_cause_is_named_and_not_those_that_lost_it(ranks: Ranks) -> None:
    ranks.behaviour[0] = "never starts"
    running = Running(ranks)
    await ranks.up(3)
    ranks.lose("turn 0: rank 2 has gone")
    os.kill(ranks.latest(2), signal.SIGKILL)
    with pytest.raises(StartupError, match=r"^rank 2 was killed by SIGKILL before the worker had started$"):
        await running.ends()


async def test_a_rank_that_crashes_at_start_shows_its_traceback(
    ranks: Ranks, shown: Callable[[], str]
) -> None:
    ranks.behaviour[0] = "crashes"
    with pytest.raises(StartupError, match=r"^rank 0 ended with exit code 1 before the worker had started$"):
        await Running(ranks).ends()
    assert "rank 0: ZeroDivisionError: a bug at start\n" in shown()


async def test_a_killed_rank_takes_all_with_it_and_the_group_comes_back(
    ranks: Ranks, shown: Callable[[], str]
) -> None:
    running = Running(ranks)
    await started(ranks, shown)
    leader = ranks.latest(0)
    ranks.kill(1)
    await ranks.up(6)
    assert all(gone(pid) for pid in ranks.pids[:3])
    assert ranks.reported == [("decode-0", leader)]
    assert ranks.living_when_reported == [[]]
    first, second = set(ranks.digests[:3]), set(ranks.digests[3:])
    assert {digest_of(each).hex() for each in ranks.secrets} == first, "all ranks of an incarnation have one"
    assert len(second) == 1
    assert first != second
    assert 'why="rank 1 was killed by SIGKILL"' in shown()
    assert await running.stop() == 0
    assert all(gone(pid) for pid in ranks.pids)


async def test_an_exit_that_no_bootstrap_took_is_left_to_the_next_launcher(
    ranks: Ranks, shown: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_reports, "REPORT_TIMEOUT_S", 0.05)
    path = str(tmp_path / "exit")
    running = Running(ranks, exit_file=path)
    await started(ranks, shown)
    leader = ranks.latest(0)
    ranks.unreachable = True
    ranks.kill(1)
    await ranks.up(6)
    assert await running.stop() == 0
    with ExitFile(path) as file:
        assert [each.pid for each in file.previous] == [leader, ranks.latest(0)]


async def test_a_stopped_rank_is_killed_when_the_others_have_given_it_up(
    ranks: Ranks, shown: Callable[[], str]
) -> None:
    running = Running(ranks)
    await started(ranks, shown)
    stopped = ranks.latest(2)
    os.kill(stopped, signal.SIGSTOP)
    ranks.lose("turn 7: rank 2 did not answer within 30 s")
    await eventually(lambda: gone(stopped))
    ranks.mend()
    await eventually(lambda: "starting it again" in shown())
    await ranks.up(6)
    assert 'cause="turn 7: rank 2 did not answer within 30 s"' in shown()
    assert await running.stop() == 0


async def test_a_group_that_does_not_come_back_waits_longer_each_time(
    ranks: Ranks, shown: Callable[[], str]
) -> None:
    running = Running(ranks)
    await started(ranks, shown)
    ranks.behaviour[2] = "refuses"
    ranks.kill(0)
    await eventually(lambda: shown().count("starting it again") >= 2)
    assert "wait_ms=0" in shown()
    assert 'cause="too little memory: lower --kv-cache-memory" wait_ms=10' in shown()
    await running.stop()


async def test_only_the_leader_gets_the_stop_signal_and_all_ranks_leave(
    ranks: Ranks, shown: Callable[[], str]
) -> None:
    running = Running(ranks)
    await started(ranks, shown)
    assert await running.stop() == 0
    assert [line for line in ranks.journal if "asked" in line] == ["0 asked"]
    assert ranks.reported == []


async def test_a_group_that_does_not_leave_is_killed_with_a_log_line(
    ranks: Ranks, shown: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.launch.rank_processes.STOP_MARGIN_S", 0.1)
    ranks.behaviour[0] = "deaf"
    running = Running(ranks, drain_timeout_ms=100)
    await started(ranks, shown)
    assert await running.stop() == EXIT_FAILED
    assert all(gone(pid) for pid in ranks.pids)
    assert shown().count("killing a rank that has not ended") == 3
    assert ranks.reported == [("decode-0", ranks.latest(0))]


async def test_a_group_that_has_not_started_has_nothing_to_finish(ranks: Ranks) -> None:
    ranks.behaviour[0] = "never starts"
    running = Running(ranks)
    await ranks.up(3)
    assert await running.stop() == 0
    assert all(gone(pid) for pid in ranks.pids)


async def test_a_group_ends_with_a_leader_that_another_process_stopped(
    ranks: Ranks, shown: Callable[[], str]
) -> None:
    running = Running(ranks)
    await started(ranks, shown)
    os.kill(ranks.latest(0), signal.SIGTERM)
    assert await running.ends() == 0


async def test_log_lines_come_out_as_they_are_and_other_lines_by_rank(
    ranks: Ranks, shown: Callable[[], str]
) -> None:
    running = Running(ranks)
    await started(ranks, shown)
    await running.stop()
    lines = shown().splitlines()
    for rank in range(3):
        assert f"2026-01-31T12:00:00.000Z INFO rank turning rank={rank}" in lines
        assert f"rank {rank}: a native library greets" in lines


async def test_ranks_go_on_where_their_lines_cannot_be_written(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.behaviour[1] = "talks"
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    monkeypatch.setattr(sys, "stderr", full)
    running = Running(ranks)
    await eventually(lambda: "1 talked" in ranks.journal)
    await asyncio.sleep(0.5)  # until the leader was seen to have started
    assert await running.stop() == 0
    with pytest.raises(OSError, match="No space left"):
        full.close()


def test_a_reserved_port_is_free_for_a_process_that_knows_it_and_for_no_other() -> None:
    with reserve_port("127.0.0.1") as reserved:
        port = port_of(reserved)
        for _ in range(2):
            with bind_port("127.0.0.1", port, "--x"), socket.create_connection(("127.0.0.1", port)):
                pass


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"tp": "4"}, r"^--tp 4: the model has 6 attention heads, which is no multiple of it$"),
        ({"tp": "3"}, r"^--tp 3: the model has 2 KV heads, which must be a multiple or a divisor of it$"),
        ({"pp": "5"}, r"^--pp 5: the model has 4 layers$"),
    ],
)
def test_what_the_model_cannot_be_cut_into_is_refused_before_a_rank_is_started(
    tmp_path: Path, flags: dict[str, str], text: str
) -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(StartupError, match=text):
        run_ranks(load(PrefillSettings, {"model": str(tmp_path), **flags}, {}), {}, serve_forked_commands)


def test_latents_are_whole_on_any_number_of_ranks(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "kv_lora_rank": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    check_shape(load(PrefillSettings, {"model": str(tmp_path), "tp": "3"}, {}))


async def test_a_metrics_port_that_is_in_use_is_refused_before_a_rank_is_started(ranks: Ranks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"^port {port} on 127.0.0.1 is in use: .* --metrics-port$"):
            await Running(ranks, metrics_port=port).ends()
    assert not ranks.pids


PART: dict[str, Any] = {"tp": 4, "machines": 2, "rendezvous": "127.0.0.1:9"}


async def part_started(ranks: Ranks, shown: Callable[[], str]) -> None:
    await ranks.up(2)
    await eventually(lambda: shown().count("turning") >= 2)
    await asyncio.sleep(0.5)


async def test_a_machine_starts_its_own_ranks_and_leaves_with_them(
    ranks: Ranks, shown: Callable[[], str]
) -> None:
    running = Running(ranks, **PART, machine=1)
    await part_started(ranks, shown)
    assert {2, 3} == ranks.started()
    assert await running.stop() == 0


async def test_a_machine_that_loses_a_rank_ends_without_a_report_of_the_workers_exit(
    ranks: Ranks, shown: Callable[[], str]
) -> None:
    """The ranks of other machines may still write."""
    running = Running(ranks, **PART, machine=0)
    await part_started(ranks, shown)
    os.kill(ranks.latest(1), signal.SIGKILL)
    with pytest.raises(StartupError, match=r"^rank 1 was killed by SIGKILL$"):
        await running.ends()
    assert all(gone(pid) for pid in ranks.pids)
    assert ranks.reported == []
    assert set(ranks.digests) == {"none"}, "nobody is to report it either"
