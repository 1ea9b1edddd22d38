"""Tests of `baton serve`: it starts a real stack, keeps it running and stops it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import pytest

from tests.http import web
from tests.ports import free_neighbours, free_port
from tests.process.stack import READY_S, STOP_S


def _said(log: Path, words: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while words not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def _ask(url: str, tokens: int = 4) -> str:
    model = web().get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": tokens, "temperature": 0}
    reply = web().post(f"{url}/v1/completions", json={**body, "ignore_eos": True}, timeout=60)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def _open_to_others(processes: Sequence[psutil.Process]) -> set[int]:
    """Return the addresses beyond the loopback on which the bootstrap listens."""
    return {
        each.laddr.port
        for process in processes
        if "bootstrap" in process.cmdline()
        for each in process.net_connections()
        if each.status == psutil.CONN_LISTEN and each.laddr.ip.removeprefix("::ffff:") != "127.0.0.1"
    }


def _assert_closed_to_other_users(processes: Sequence[psutil.Process], log: Path) -> None:
    """Check that callers without the run token, which no other user can read, are refused."""
    [token] = {each.environ()["BATON_RUN_TOKEN"] for each in processes if "bootstrap" in each.cmdline()}
    said = [" ".join(each.cmdline()) for each in processes] + [log.read_text()]
    assert not any(token in text for text in said)
    listing = "/baton.v1.RoomService/ListRooms"
    with grpc.insecure_channel("127.0.0.1:8100") as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(listing)(b"", timeout=STOP_S)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        shown = [("baton-run-token", token)]
        assert channel.unary_unary(listing)(b"", timeout=STOP_S, metadata=shown)


def _forked(process: psutil.Process, among: Sequence[psutil.Process]) -> bool:
    """Return whether the process is a fork of the preloaded one. A process that was started anew has its
    stack at another address."""
    preloaded = next(each for each in among if "baton.cli.forked_commands" in each.cmdline())
    mapped = [Path(f"/proc/{each.pid}/maps").read_text().splitlines() for each in (preloaded, process)]
    [one, other] = [next(line.split("-")[1] for line in lines if "[stack]" in line) for lines in mapped]
    return one == other


def test_serve_starts_restarts_and_drains(tmp_path: Path, demo_model_dir: Path) -> None:
    log, port, metrics = tmp_path / "serve.log", free_port(), free_neighbours(2)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "baton.cli.main", "serve", "--port", str(port)]
    command += ["--model", str(demo_model_dir), "--kv-cache-memory", "128MiB"]
    command += ["--host", "0.0.0.0", "--metrics-port", str(metrics)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environ)
    children: list[psutil.Process] = []
    try:
        _said(log, "Ready:", process)
        assert "Paris" in _ask(url)
        _said(log, f"decode-0 http://127.0.0.1:{metrics + 1}/metrics", process)
        for worker_port, role in ((metrics, "prefill"), (metrics + 1, "decode")):
            assert f'role="{role}"' in web().get(f"http://127.0.0.1:{worker_port}/metrics").text

        children = psutil.Process(process.pid).children(recursive=True)
        assert _open_to_others(children) == {port}, "whoever reaches another one may be a worker"
        _assert_closed_to_other_users(children, log)
        decode = next(child for child in children if "decode" in child.cmdline())
        assert _forked(decode, children)
        decode.kill()
        _said(log, "starting it again", process)
        deadline = time.monotonic() + READY_S
        while web().get(f"{url}/ready").status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.02)  # the exit is still being reported
        while web().get(f"{url}/ready").status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "Paris" in _ask(url)

        children = psutil.Process(process.pid).children(recursive=True)
        again = next(child for child in children if "decode" in child.cmdline())
        assert again.pid != decode.pid
        assert _forked(again, children)
        with ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(_ask, url, tokens=32) for _ in range(4)]
            while 'baton_rooms{phase="streaming"} 4' not in web().get(f"{url}/metrics").text:
                assert not any(each.done() for each in asked), "they are all under way at once"
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_S) == 0, log.read_text()
            assert all("Paris" in each.result() for each in asked), "what was accepted is answered"
        gone, alive = psutil.wait_procs(children, timeout=STOP_S)
        assert len(gone) >= 3
        assert not alive
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(STOP_S)


def _bootstraps(serve: subprocess.Popen[bytes]) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(serve.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a process that was killed
            found += [each] if "bootstrap" in each.cmdline() else []
    return found


def _listening(processes: Sequence[psutil.Process], port: int) -> list[psutil.Process]:
    """Return the processes that take connections on a port."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            ports = [
                each.laddr.port for each in process.net_connections() if each.status == psutil.CONN_LISTEN
            ]
            found += [process] if port in ports else []
    return found


def test_two_bootstraps_share_a_port_and_the_port_is_served_while_one_starts_again(
    tmp_path: Path, demo_model_dir: Path
) -> None:
    log, port, grpc_ports = tmp_path / "serve.log", free_port(), free_neighbours(2)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "baton.cli.main", "serve", "--port", str(port), "--bootstraps", "2"]
    command += ["--model", str(demo_model_dir), "--kv-cache-memory", "128MiB"]
    command += ["--grpc-port", str(grpc_ports)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environ)
    try:
        _said(log, "Ready:", process)
        first = _bootstraps(process)
        assert len(first) == 2
        first[0].kill()
        first[0].wait(STOP_S)
        statuses = [web().get(f"{url}/ready").status_code for _ in range(3)]  # while it is away
        deadline = time.monotonic() + READY_S
        while len(_listening(_bootstraps(process), port)) < 2:
            statuses.append(web().get(f"{url}/ready").status_code)
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        statuses += [web().get(f"{url}/ready").status_code for _ in range(20)]  # of either
        assert set(statuses) == {200}, "one that starts leaves the port to the other"
        with ThreadPoolExecutor(8) as clients:
            assert all("Paris" in text for text in clients.map(lambda _: _ask(url), range(8)))
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(STOP_S)
