"""`baton role`: the share of requests of each side that a process of both sides gets."""

from urllib.parse import quote

from baton.cli.admin import Bootstrap, admin


def run_role(process: str, prefill: int, at: Bootstrap, known: frozenset[str]) -> int:
    """Set the weight at the bootstrap, and print the result. Return the exit code. Raises StartupError."""
    with admin(at, known) as pages:
        answer = pages.write(f"workers/{quote(process, safe='')}", {"prefill_weight": prefill})
        [text] = pages.rendered(
            lambda body: [
                f"{body['process']}: prefill {body['prefill_weight']}, decode {body['decode_weight']}"
            ],
            answer,
        )
    print(text)
    return 0
