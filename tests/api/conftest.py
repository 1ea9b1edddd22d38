"""Fixtures of the HTTP API's tests."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.http.middleware import ApiMiddleware
from baton.grammars.grammar_check import SerializableTokenizer, check_grammar
from baton.grammars.vocabulary import vocabulary_of
from baton.rooms.request import Grammar
from baton.runtime.errors import StartupError
from baton.runtime.listening_ports import bind_port
from baton.web.http_server import serve_http
from tests.api import tiny
from tests.api.scripted import ScriptedBackend
from tests.support.manual_clock import ManualClock

CREATED_S = 1_700_000_000


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model_dir: Path) -> Any:
    """The demo model's tokenizer, as the reference library has it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(demo_model_dir), local_files_only=True)


class LocalGrammarChecker:
    """Checker of grammars in this process."""

    def __init__(self, tokenizer: SerializableTokenizer, tokens: int, ends: Sequence[int]) -> None:
        self._arguments = tokenizer, tokens, ends

    def check(self, grammar: Grammar, any_bnf: bool) -> Grammar | str:
        try:
            return check_grammar(grammar, any_bnf, vocabulary_of(*self._arguments))
        except StartupError as error:
            return str(error)


@pytest.fixture(autouse=True)
def checks_grammars_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check grammars in this process. `tests/grammars/test_grammar_check.py` starts one for that."""
    monkeypatch.setattr("baton.api.app.GrammarChecker", LocalGrammarChecker)


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def app(backend: ScriptedBackend, registry: CollectorRegistry) -> ApiMiddleware:
    return create_app(backend, tiny.model(), registry, clock=ManualClock(wall_ms=CREATED_S * 1000))


@pytest.fixture
async def http(app: ApiMiddleware) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, without a socket."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
async def url(app: ApiMiddleware) -> AsyncIterator[str]:
    """URL of the application on a real socket."""
    server = await serve_http(app, bind_port("127.0.0.1", 0, "test"), graceful_timeout_s=5)
    yield f"http://127.0.0.1:{server.port}"
    await server.stop()
