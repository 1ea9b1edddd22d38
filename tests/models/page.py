"""The text of docs/models.md: the models that are served, and those that are refused."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import transformers

from tests.models.comparison import Outcome, TrialVerdict
from tests.models.recipes import causal_types, container_types
from tests.models.released import FAMILIES, RELEASED
from tests.models.vllm_outcomes import VllmOutcomes

PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"
REWRITE: Final = "python -m tests.models --rewrite"
SERVED: Final = "served"
NAMES: Final = re.compile(r" (?:of )?<class '[^>]*>?|(?<=Model architecture)s \['\w+'\] are(?= not)")
"""Names of classes in a reason, by which it would differ from others."""
UNKNOWN: Final = "–"
"""Cell of a type that was not tried."""

INTRODUCTION: Final = """\
# Which models are served?

Look yours up by its name, or by the `model_type` in its `config.json`. This page is of transformers
{version}. `{rewrite}` writes it. It builds a small model of random weights for
every type, with the features of its releases (scaled rotations, windows, soft caps, sinks, the
pattern of its layers). It compares Baton's answers with `generate`'s in float32, token for token,
and their log probabilities. Prompts have 5, 70 and 300 tokens (windows of 64). They run alone and
together, in chunks of 512 and of 40, after a hand-over to another cache, and after another prompt's
prefix if no layer has a state. `make verify-models` does the same and compares this page with it.

* **Served** means that all of that was equal. Nothing else is served: any other model is refused at
  the start, with the words of this page.
* All of it holds for the torch engine. What `--engine vllm` serves is in the column *vLLM's engine*
  and [below](#with-vllms-engine).
* If the library's own attentions differ from each other (with ALiBi, for one), the column *with*
  says which one was compared.
* *Latents* in the column *with*: a page holds the compressed keys and values that all heads share
  (MLA), and no keys and values of each head.
* *States* in the column *with*: layers store states, and no keys and values of each token.
* If a model reads images or sound too, its text is served.
* Quantized checkpoints are dequantized as they are loaded: FP8, compressed-tensors, MXFP4, NVFP4,
  GPTQ and AWQ ([which](engine.md#quantized-checkpoints)).
* How a step is computed, and what that costs, is in
  [engine.md](engine.md#ways-of-computing-a-step).

Of {types} types of language models {equal} are served, and of {containers} types that read more {texts}.
"""
BY_FAMILY: Final = """
## By family

Families that are deployed with prefill and decode apart. Of {families} the torch engine serves {torch},
and vLLM's engine on CPUs is equal for {vllm}. {neither} have neither. A family counts if one of its
types does.

| family | `model_type` | its layers can have | torch engine | vLLM's engine |
|---|---|---|---|---|
"""
BY_NAME: Final = """
## By name

A name stands for its family.

| checkpoint | `model_type` | stored as | served | vLLM's engine |
|---|---|---|---|---|
"""
BY_TYPE: Final = """
## By type

*TP*: over tensor-parallel ranks (`--tp`). *PP*: over pipeline stages (`--prefill-pp`). *Yes* means
that the tokens of two were equal, too. How a model is cut is in
[groups.md](groups.md#which-models).

| `model_type` | computed by | with | TP | PP | vLLM's engine |
|---|---|---|---|---|---|
"""
OF_CONTAINERS: Final = """
The text of models that read more than text:

| `model_type` | computed by | with | TP | PP | vLLM's engine |
|---|---|---|---|---|---|
"""
NOT_SERVED: Final = """
## What is refused, and why

| reason | `model_type` |
|---|---|
"""
NOT_SPLIT: Final = """
## What one rank alone serves

| reason | `model_type` |
|---|---|
"""
UNTRIED: Final = """
## Not tried

No small model of these is made here. They are judged like all others when they are loaded.

| what is missing | `model_type` |
|---|---|
"""
WITH_VLLM: Final = """
## With vLLM's engine

This is of vLLM {vllm} on a CPU, in float32, with transformers {version}, which it needs. The small
models have heads of 32 elements, the fewest that vLLM's attention on a CPU has. The right answers are
those of vLLM's own `LLM`, which computes each prompt whole and alone. Baton's answers are compared
with them as above: tokens, and log probabilities. They go on in a second KV memory over the same
weights. `make test-vllm ARGS="--all-models tests/vllm/test_models.py"` compares all of them again. That
takes a quarter of an hour.

Of {types} types and architectures, {equal} are equal and {wrong} are wrong. Baton refuses {refused}
by name. vLLM itself does not run {unrunnable} of the small models on a CPU, for the reasons in the table.
For {untried} no small model was made, and {broken} ended without an answer.

* *vLLM's definition* and *transformers' definition* say whose code vLLM computes the model with.
* *In bfloat16*: vLLM computes some of the layers on CPUs in this format alone. Prompts are computed
  whole there, since an answer depends on the chunks.
* *Its rotation by torch*: vLLM alone rotates wrongly on CPUs
  ([why](serving.md#with-vllms-engine)). Its `LLM` answered with that corrected.
* *Failed to be inspected*: vLLM's definition imports torchvision, which is not installed
  ([why](dependencies.md#what-is-installed)).
* Names in capitals are architectures of vLLM that transformers {version} does not have.
* *–* in the tables above means not tried. Transformers {version} does not have the type, or it reads
  more than text.

| outcome | defined by, or reason | `model_type` |
|---|---|---|
"""


def rendered(outcomes: Mapping[str, Outcome]) -> str:
    """The page, of the outcome of every type, and of the recorded ones on vLLM's engine."""
    causal, containers, recorded = causal_types(), container_types(), VllmOutcomes.read()
    told = INTRODUCTION.format(
        version=transformers.__version__,
        rewrite=REWRITE,
        types=len(causal),
        equal=len(_equal(outcomes).intersection(causal)),
        containers=len(containers),
        texts=len(_equal(outcomes).intersection(containers)),
    )
    lines = told.rstrip("\n").split("\n")
    lines += family_section(outcomes, recorded)
    lines += BY_NAME.rstrip("\n").split("\n")
    lines += (
        f"| {name} | {_code(kind)} | {stored} | {_told(outcomes[kind])} | {cell(recorded, kind)} |"
        for name, kind, stored in RELEASED
    )
    lines += BY_TYPE.rstrip("\n").split("\n")
    lines += rows_of(outcomes, [kind for kind in causal if kind not in containers])
    lines += OF_CONTAINERS.rstrip("\n").split("\n")
    lines += rows_of(outcomes, containers)
    for heading, verdict in ((NOT_SERVED, TrialVerdict.REFUSED), (UNTRIED, TrialVerdict.UNTRIED)):
        lines += heading.rstrip("\n").split("\n")
        lines += grouped((kind, each.words) for kind, each in outcomes.items() if each.verdict is verdict)
    lines += NOT_SPLIT.rstrip("\n").split("\n")
    lines += grouped((kind, words) for kind, each in outcomes.items() for words in set(each.ranks) if words)
    lines += vllm_section(recorded)
    return "\n".join(lines) + "\n"


def family_section(outcomes: Mapping[str, Outcome], recorded: VllmOutcomes) -> list[str]:
    """Return the lines on families. `outcomes`: on the torch engine, by type."""
    torch, vllm = (
        {name for name, kinds in FAMILIES if any(kind in equal for kind in kinds)}
        for equal in (_equal(outcomes), _equal(recorded.types))
    )
    neither = len(FAMILIES) - len(torch | vllm)
    text = BY_FAMILY.format(families=len(FAMILIES), torch=len(torch), vllm=len(vllm), neither=neither)
    return [*text.rstrip("\n").split("\n"), *(_family(*each, outcomes, recorded) for each in FAMILIES)]


def _family(name: str, kinds: Sequence[str], outcomes: Mapping[str, Outcome], recorded: VllmOutcomes) -> str:
    served = [kind for kind in kinds if kind in _equal(outcomes)]
    features = dict.fromkeys(each for kind in served for each in outcomes[kind].sights)
    cells = (
        name,
        ", ".join(map(_code, kinds)),
        (", ".join(features) or "full attention") if served else UNKNOWN,
        _by_type({kind: _told(outcomes[kind]) if kind in outcomes else UNKNOWN for kind in kinds}),
        _by_type({kind: cell(recorded, kind) for kind in kinds}),
    )
    return f"| {' | '.join(cells)} |"


def _by_type(cells: Mapping[str, str]) -> str:
    """Return the text of cells by type: once if they are all the same."""
    if len(set(cells.values())) == 1:
        return next(iter(cells.values()))
    return ", ".join(f"{_code(kind)} {text}" for kind, text in cells.items())


def cell(recorded: VllmOutcomes, kind: str) -> str:
    """Return the verdict on a type in the column of vLLM's engine."""
    outcome = recorded.types.get(kind)
    return UNKNOWN if outcome is None else outcome.verdict.value


def vllm_section(recorded: VllmOutcomes) -> list[str]:
    """Return the lines on vLLM's engine."""
    kinds: dict[TrialVerdict, list[str]] = defaultdict(list)
    for kind, each in recorded.types.items():
        kinds[each.verdict].append(kind)
    text = WITH_VLLM.format(
        vllm=recorded.vllm,
        version=recorded.transformers,
        types=len(recorded.types),
        **{verdict.name.lower(): len(kinds[verdict]) for verdict in TrialVerdict},
    )
    lines = text.rstrip("\n").split("\n")
    for verdict in TrialVerdict:
        reasons = ((kind, NAMES.sub("", recorded.types[kind].words)) for kind in kinds[verdict])
        lines += (f"| {verdict.value} {line}" for line in grouped(reasons))
    return lines


def _equal(outcomes: Mapping[str, Outcome]) -> set[str]:
    return {kind for kind, each in outcomes.items() if each.verdict is TrialVerdict.EQUAL}


def rows_of(outcomes: Mapping[str, Outcome], kinds: Sequence[str]) -> Iterator[str]:
    """The lines of those of `kinds` that are served."""
    recorded = VllmOutcomes.read()
    for kind in sorted(kinds):
        each = outcomes[kind]
        if each.verdict is TrialVerdict.EQUAL:
            ranks = ("no" if words else "yes" for words in each.ranks)
            cells = (each.words, ", ".join(each.sights), *ranks, cell(recorded, kind))
            yield f"| {_code(kind)} | {' | '.join(cells)} |"


def grouped(reasons: Iterator[tuple[str, str]]) -> Iterator[str]:
    """Yield table rows of the reasons with their model types, those with the most types first."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for kind, words in reasons:
        kinds[words].append(kind)
    for words, those in sorted(kinds.items(), key=lambda each: (-len(each[1]), each[0])):
        listed = ", ".join(_code(kind) for kind in sorted(those))
        yield f"| {words.replace('|', '/')} | {listed} |"


def _told(outcome: Outcome) -> str:
    if outcome.verdict is TrialVerdict.EQUAL:
        return SERVED
    return f"no: {outcome.words}" if outcome.verdict is TrialVerdict.REFUSED else outcome.verdict.value


def _code(kind: str) -> str:
    return f"`{kind}`"
