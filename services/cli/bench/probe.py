"""Which model does a server have, and how does it take prompts? Asked before anything is measured."""

from dataclasses import replace
from typing import Final

import httpx

from baton.cli.asking import trusted
from baton.cli.bench.lengths import Lengths
from baton.cli.bench.load import LoadGenerator
from baton.cli.bench.stream_client import ServerAddress
from baton.cli.bench.workload import ApiEndpoint, Ask, PromptForm, Workload, Writer, make_asks
from baton.runtime.errors import StartupError

MODELS_TIMEOUT_S: Final = 10.0
PROBES: Final = -1
"""The turn of the probes: no measured one is like it."""
PROBE_TOKENS: Final = 2
"""One from each side of a disaggregated server."""


class NotMeasurable(StartupError):
    """The server does not answer what is asked of it. Says what it said."""


def model_of(server: ServerAddress) -> str:
    """The first that it lists. Raises NotMeasurable."""
    try:
        reply = httpx.get(
            f"{server.url}/v1/models",
            headers=dict(server.headers),
            timeout=MODELS_TIMEOUT_S,
            trust_env=False,
            verify=trusted(),
        )
        name = reply.json()["data"][0]["id"]
    except httpx.TransportError as error:
        raise NotMeasurable(f"no server answers at {server.url}: {error}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise NotMeasurable(f"{server.url}/v1/models names no model: say it with --model") from None
    return str(name)


async def writer_for(
    load: LoadGenerator,
    workload: Workload,
    model: str,
    prompts: PromptForm | None,
    *,
    ignore_eos: bool = True,
) -> Writer:
    """Token ids where the server takes them, unless `prompts` says otherwise; else text, made to length.

    Raises NotMeasurable.
    """
    refused = ""
    if workload.endpoint is ApiEndpoint.COMPLETIONS and prompts is not PromptForm.TEXT:
        writer = Writer(model, workload.endpoint, PromptForm.IDS, ignore_eos=ignore_eos)
        refused = await _refused(load, workload, writer)
        if not refused:
            return writer
        if prompts is PromptForm.IDS or not refused.startswith(("HTTP 400", "HTTP 415", "HTTP 422")):
            raise NotMeasurable(f"a prompt of token ids was not answered: {refused}")
    plain = Writer(model, workload.endpoint, PromptForm.TEXT, ignore_eos=ignore_eos)
    pieces = list(range(workload.prompt_tokens.longest))
    outcome = await load.closed([Ask(plain.body(pieces, 1))], 1)
    if not outcome.answers:
        before = f" (and one of token ids: {refused})" if refused else ""
        raise NotMeasurable(f"a prompt of text was not answered: {outcome.failures[0]}{before}")
    overhead = outcome.answers[0].prompt_tokens - len(pieces)
    return replace(plain, overhead=overhead, ids_refused=refused)


async def _refused(load: LoadGenerator, workload: Workload, writer: Writer) -> str:
    """Why one prompt was not answered; empty if it was."""
    short = replace(workload, output_tokens=Lengths.parse(str(PROBE_TOKENS)))
    outcome = await load.closed(make_asks(short, writer, 1, PROBES), 1)
    return outcome.failures[0] if outcome.failures else ""
