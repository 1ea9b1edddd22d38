"""Tests that each client's script is listed, short, and a program of its language."""

import ast
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.clients.long_model import CONTEXT_TOKENS, write_long_model
from tests.clients.page import PAGE, row
from tests.clients.table import CLIENTS, LINES_MAX, SCRIPTS, Client
from tests.clients.trial import Outcome

LISTED = sorted({client.script for client in CLIENTS})


def test_every_script_is_a_clients_and_every_client_has_a_name_of_its_own() -> None:
    assert sorted(each.name for each in SCRIPTS.iterdir() if each.suffix in (".py", ".mjs")) == LISTED
    assert set(Counter(client.name for client in CLIENTS).values()) == {1}


@pytest.mark.parametrize("script", LISTED)
def test_a_script_is_short_and_compiles(script: str) -> None:
    path = SCRIPTS / script
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES_MAX
    if path.suffix == ".py":
        assert ast.get_docstring(ast.parse(text, script))
    elif (node := shutil.which("node")) is not None:
        subprocess.run([node, "--check", str(path)], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_package_has_one_version(client: Client) -> None:
    pinned = r"@?[\w./-]+(\[\w+\])?(==|@)\d[\w.]*"
    assert client.packages
    assert all(re.fullmatch(pinned, each) for each in client.packages)


def test_a_model_for_long_prompts_is_the_demo_models_shape(demo_model_dir: Path, tmp_path: Path) -> None:
    folder = write_long_model(demo_model_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own = json.loads((demo_model_dir / "config.json").read_text(encoding="utf-8"))
    assert config["max_position_embeddings"] == CONTEXT_TOKENS > own["max_position_embeddings"]
    assert config["hidden_size"] == own["hidden_size"]
    ends = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    assert own["eos_token_id"] in ends
    assert max(ends) < config["vocab_size"]
    assert (folder / "tokenizer.json").exists()
    assert not [*folder.glob("*.safetensors")]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_the_page_has_each_client_with_its_versions(client: Client) -> None:
    told = row(client, Outcome(client.name, client.packages, True, ()))
    assert told.rpartition(" | ")[0] in PAGE.read_text(encoding="utf-8")
