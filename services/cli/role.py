"""Command `baton role`, which sets how a process that serves both sides divides its time between them."""

from urllib.parse import quote

from baton.cli.admin import Bootstrap, admin


def run_role(process: str, prefill: int, at: Bootstrap, known: frozenset[str]) -> int:
    """Set the prefill weight of `process` at the bootstrap, and print the result. Return the exit code.

    `prefill`: parts of 100 of its time. Raises StartupError.
    """
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
