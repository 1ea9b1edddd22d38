"""The `llm` command: a prompt, `--schema`, and `-T` with a tool."""

import json
import os
import subprocess
import sys
from pathlib import Path

home = Path("llm-home").absolute()
home.mkdir(exist_ok=True)
(home / "extra-openai-models.yaml").write_text(
    f"""
- model_id: baton
  model_name: {os.environ["MODEL"]}
  api_base: {os.environ["OPENAI_BASE_URL"]}
  supports_schema: true
  supports_tools: true
"""
)


def llm(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("llm")), "-m", "baton", *arguments]
    done = subprocess.run(
        command, env=os.environ | {"LLM_USER_PATH": str(home)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]
    return done.stdout.strip()


ask = "How many legs has a dog?"
assert llm(ask, "-o", "max_tokens", "8")
print("a prompt: answered")
told = json.loads(llm(ask, "--schema", "legs int, tail bool", "-o", "max_tokens", "64"))
assert type(told["legs"]) is int
print("--schema:", told)
said = llm("What version of llm is this?", "-T", "llm_version", "--td", "-o", "max_tokens", "48")
print("-T:", len(said) > 0)
