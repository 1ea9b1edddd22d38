"""How is a process that serves both sides given another share of requests on each?"""

from urllib.parse import quote

from baton.cli.admin import Bootstrap, admin


def run_role(process: str, prefill: int, at: Bootstrap, known: frozenset[str]) -> int:
    """Tell the bootstrap, and print what holds now. Returns the exit code. Raises StartupError."""
    with admin(at, known) as pages:
        told = pages.write(f"workers/{quote(process, safe='')}", {"prefill_weight": prefill})
        [text] = pages.understood(
            lambda body: [
                f"{body['process']}: prefill {body['prefill_weight']}, decode {body['decode_weight']}"
            ],
            told,
        )
    print(text)
    return 0
