"""What do `baton top` and `baton explain` say when they cannot read, and print of odd stories?"""

from typing import Any

import httpx
import pytest
from rich.console import Console, Group

from services.cli import explain, top
from services.cli.admin import Admin, NotTold
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
            "A valid API key is needed. Set OPENAI_API_KEY.",
        ),
        (
            httpx.Response(404, json={"error": {"message": "Nothing is served at /live."}}),
            "If the bootstrap has an --admin-port, name that with --url.",
        ),
    ],
)
def test_what_cannot_be_read_is_told_in_a_sentence(reply: httpx.Response | Exception, told: str) -> None:
    with pytest.raises(NotTold) as error:
        reading(reply).read("live")
    assert told in str(error.value)


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
    }
    assert printed(explain.told(story)).count(odd) >= 5
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
    }
    lost = {"name": odd, "why": odd, "wall_ms": 0, "rooms": 1}
    live = {
        "rooms": {"open": 1},
        "queued": 0,
        "kept": 2,
        "workers": [worker],
        "lost": [lost],
        "requests": [request],
        "failed": [request],
    }
    text = printed(top.told(live))
    assert "[bold]x[/bold]" in text
    assert "3 free" in text
