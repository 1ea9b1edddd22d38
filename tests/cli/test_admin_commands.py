"""Tests of `baton top` and `baton explain`: errors of reading, and odd timelines."""

import io
import os
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console, Group

from baton.cli import explain, top
from baton.cli.admin import Admin, Bootstrap, BootstrapUnreadable, admin
from baton.cli.chat_settings import base_of
from baton.cli.main import KNOWN
from baton.runtime.errors import StartupError
from tests.cli.typed import baton


def reading(reply: httpx.Response | Exception) -> Admin:
    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(reply, Exception):
            raise reply
        return reply

    http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
    return Admin(http, "http://server")


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (
            httpx.ConnectError("refused"),
            "no bootstrap answers at http://server: start one, or name it with --url",
        ),
        (
            httpx.ConnectError("[SSL] certificate verify failed"),
            "the certificate of http://server is not trusted",
        ),
        (httpx.ReadTimeout("slow"), "was silent for 10 s"),
        (httpx.ReadError("reset"), "the connection to http://server broke: reset"),
        (httpx.Response(200, text="<html>"), "is no bootstrap: HTTP 200"),
        (httpx.Response(200, json=["a list"]), "http://server answered 200"),
        (
            httpx.Response(401, json={"error": {"message": "A valid API key is needed."}}),
            "A valid API key is needed. Name its file with --admin-api-key-file, or set BATON_ADMIN_API_KEYS",
        ),
        (
            httpx.Response(403, json={"error": {"message": "This is for operators."}}),
            "This is for operators. Name its file with --admin-api-key-file, or set BATON_ADMIN_API_KEYS",
        ),
        (
            httpx.Response(404, json={"error": {"message": "Nothing is served at /live."}}),
            "If the bootstrap has an --admin-port, name that with --url.",
        ),
    ],
)
def test_an_unreadable_page_is_one_sentence(reply: httpx.Response | Exception, told: str) -> None:
    with pytest.raises(BootstrapUnreadable) as error:
        reading(reply).read("live")
    assert told in str(error.value)


def test_the_first_admin_key_is_sent_else_the_key_of_every_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent(**typed: str) -> str | None:
        with admin(Bootstrap(**typed), KNOWN) as pages:
            key: str | None = pages.headers.get("authorization")
            return key

    file = tmp_path / "keys"
    file.write_text("# admins\nsk-of-the-file-0123456789\nsk-second-0123456789\n")
    assert sent() is None
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-client")
    assert sent() == "Bearer sk-of-a-client"
    monkeypatch.setenv("BATON_ADMIN_API_KEY_FILE", str(file))
    assert sent() == "Bearer sk-of-the-file-0123456789"
    monkeypatch.setenv("BATON_ADMIN_API_KEYS", "sk-of-the-variable-0123456789")
    assert sent() == "Bearer sk-of-the-variable-0123456789"
    monkeypatch.delenv("BATON_ADMIN_API_KEYS")
    monkeypatch.delenv("BATON_ADMIN_API_KEY_FILE")
    assert sent(admin_api_key_file=str(file)) == "Bearer sk-of-the-file-0123456789"
    with pytest.raises(StartupError, match=r"--admin-api-key-file .*none cannot be read"):
        sent(admin_api_key_file=str(tmp_path / "none"))


@pytest.mark.parametrize("command", ["top", "explain", "role"])
def test_each_command_takes_the_file_of_admin_keys(command: str) -> None:
    words = {"top": [], "explain": ["x"], "role": ["worker-0", "--prefill", "70"]}[command]
    said = baton(command, *words, "--admin-api-key-file", "/nowhere/keys")
    assert said.returncode == 1
    assert "--admin-api-key-file /nowhere/keys cannot be read" in said.stderr


@pytest.mark.parametrize("command", [["top", "--once"], ["explain", "x"]])
def test_without_a_bootstrap_the_command_ends_with_one_line(command: list[str]) -> None:
    said = baton(*command, "--url", "http://127.0.0.1:1")
    assert said.returncode == 1
    assert said.stderr.startswith("baton: error: no bootstrap answers at http://127.0.0.1:1")
    assert len(said.stderr.splitlines()) == 1


def test_a_url_that_is_none_is_refused_by_name() -> None:
    said = baton("top", "--url", "nowhere")
    assert said.returncode == 2
    assert "--url" in said.stderr


def printed(told: Any) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: PTH123, SIM115
    console.print(Group(*told))
    return console.export_text()


def test_names_and_texts_are_printed_as_they_are_and_never_as_markup() -> None:
    odd = "[bold]x[/bold] [/]"
    line = {"at_ms": 1.0, "lane": odd, "room": "", "kind": "failure", "name": "refused", "detail": odd}
    story = {
        "request_id": odd,
        "state": "refused",
        "headline": odd,
        "cause": {"reason": odd, "text": odd, "meaning": odd},
        "begun_wall_ms": 0,
        "trace_id": "",
        "others": [],
        "attempts": [],
        "stages": [],
        "lines": [line],
        "bootstrap": odd,
        "unanswered": [odd],
    }
    assert printed(explain.timeline_lines(story)).count(odd) >= 7
    worker = {
        "name": odd,
        "state": "ready",
        "rooms": 1,
        "rooms_max": 2,
        "queues": {odd: 1},
        "pages": {"free": 3, "committed": 1},
        "tokens_s": 1.0,
    }
    request = {
        "request_id": odd,
        "state": "failed",
        "begun_wall_ms": 0,
        "total_ms": 5,
        "first_token_ms": None,
        "prefill": odd,
        "decode": odd,
        "cause": odd,
        "bootstrap": odd,
    }
    lost = {"name": odd, "why": odd, "wall_ms": 0, "rooms": 1}
    live = {
        "rooms": {"open": 1},
        "queued": 0,
        "kept": 2,
        "bootstraps": [bootstrap_of_live(odd, queued=1)] * 2,
        "unanswered": [odd],
        "workers": [worker],
        "lost": [lost],
        "requests": [request],
        "failed": [request],
    }
    text = printed(top.stack_lines(live))
    assert text.count("[bold]x[/bold]") >= 7
    assert "3 free" in text


def bootstrap_of_live(address: str, queued: int, running: int = 0) -> dict[str, Any]:
    rooms = {"open": running - running // 2, "streaming": running // 2, "closing": 7}
    return {"address": address, "queued": queued, "rooms": rooms, "ready": {"prefill": 4, "decode": 5}}


def test_each_bootstraps_own_queue_is_a_row_and_a_silent_one_a_sentence() -> None:
    silent = "Bootstrap 10.0.0.3:8100 did not answer within 1 s."
    live = live_of("prefill-0") | {
        "bootstraps": [bootstrap_of_live("10.0.0.1:8100", 0), bootstrap_of_live("10.0.0.2:8100", 12, 3)],
        "unanswered": [silent],
    }
    live["requests"][0]["bootstrap"] = "10.0.0.2:8100"
    text = printed(top.stack_lines(live))
    rows = [line.split() for line in text.splitlines()]
    for row in (["10.0.0.1:8100", "0", "0", "4", "5"], ["10.0.0.2:8100", "12", "3", "4", "5"]):
        assert row in rows
    assert silent in text
    assert text.count("10.0.0.2:8100") == 2, "a row, and beside its request"
    alone = printed(top.stack_lines(live_of("prefill-0")))
    assert "10.0.0.1:8100" not in alone, "the queue of the only bootstrap stands above"


def worker_of_live(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "state": "draining",
        "rooms": 255,
        "rooms_max": 256,
        "queues": {"prealloc": 10, "transfer": 3, "waiting": 2, "running": 128},
        "pages": {"committed": 12_000, "cached": 1200, "free": 30_000, "quarantined": 3},
        "tokens_s": 12_345.0,
    }


def live_of(*names: str) -> dict[str, Any]:
    request = {
        "begun_wall_ms": 1,
        "request_id": "req-0123456789abcdef0123456789abcdef",
        "state": "answered",
        "first_token_ms": 1234,
        "total_ms": 12_345,
        "prefill": names[0],
        "decode": names[0],
        "cause": None,
        "bootstrap": "",
    }
    failed = {**request, "state": "failed", "cause": "transfer_failed"}
    return {
        "rooms": {"open": 1},
        "queued": 0,
        "kept": 1,
        "bootstraps": [bootstrap_of_live("10.0.0.1:8100", 0)],
        "unanswered": [],
        "workers": [worker_of_live(each) for each in names],
        "lost": [],
        "requests": [request, failed],
        "failed": [failed],
    }


@pytest.mark.parametrize("width", [80, 120, 160])
def test_the_stack_keeps_its_shape_whatever_the_terminals_width(width: int) -> None:
    names = ("prefill-0", "baton-decode-7f9c6d5b5d-x2x8k")
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    console.print(Group(*top.stack_lines(live_of(*names))))
    text = console.export_text()
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= width
    assert "transfer_failed" in text
    assert "draining" in text
    if width == 80:
        assert sum("draining" in line for line in lines) == len(names)
        assert all("12,345" in line for line in lines if "draining" in line), "one line tells all of a worker"


def test_a_screen_ends_at_q_and_the_terminal_is_as_it_was() -> None:
    ours, theirs = os.openpty()
    before = termios.tcgetattr(theirs)
    script = (
        "from baton.cli.keyboard import Keyboard\n"
        "with Keyboard() as keyboard:\n"
        "    print('ready', flush=True)\n"
        "    while (key := keyboard.wait(0.01)) != 'q': key and print('key', key, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=theirs, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        os.write(ours, b"x")
        assert reader.stdout.readline() == "key x\n"
        os.write(ours, b"q")
        assert reader.wait(30) == 0
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("asked", [".", ".."])
def test_a_malformed_request_id_is_refused(asked: str) -> None:
    said = baton("explain", asked, "--url", "http://127.0.0.1:1")
    assert said.stderr == f"baton: error: no request has the id '{asked}'\n"


@pytest.mark.parametrize(
    ("prefill", "same_process", "where"),
    [
        ("prefill-0", False, "on prefill-0 and decode-0"),
        ("", False, "on decode-0 alone"),
        ("", True, "on decode-0, both sides"),
    ],
)
def test_a_room_shows_its_workers_or_its_only_one(prefill: str, same_process: bool, where: str) -> None:
    attempt = {
        "room": "7",
        "prefill": prefill,
        "decode": "decode-0",
        "same_process": same_process,
        "phase": "retired",
        "cause": None,
        "events_dropped": 0,
    }
    story = {
        "request_id": "request-1",
        "state": "answered",
        "headline": "Answered.",
        "cause": None,
        "begun_wall_ms": 0,
        "trace_id": "",
        "others": [],
        "attempts": [attempt],
        "stages": [],
        "lines": [],
        "bootstrap": "",
        "unanswered": [],
    }
    assert f"Room 7 {where}, retired" in printed(explain.timeline_lines(story))


def test_an_answer_of_another_shape_is_one_line_and_no_traceback() -> None:
    pages = reading(httpx.Response(200, json={"requests": []}))
    with pytest.raises(BootstrapUnreadable, match="another way than this version"):
        pages.rendered(explain.timeline_lines, pages.read("requests/x"))


def test_the_url_of_the_api_is_taken_as_the_servers() -> None:
    assert [base_of(f"http://h:1{path}") for path in ("", "/", "/v1", "/v1/", "/gpu/v1")] == [
        *["http://h:1"] * 4,
        "http://h:1/gpu",
    ]
