"""All behaviours by group, read from the YAML files beside this one.

A file is a list of sections. A section has rows, and `defaults` for them. Keys of a row:

    claim           what has to be so; unique in its group for a path
    from            peer and test file, by its name in sources.yaml
    path            route, or the short name of one; a list makes a row of each
    fields          fields of the body beside BASE's; $NAME is a value of values.yaml, $absent removes one
    output          text that the model generates (`Hello world`), or output_tokens: its token ids
    text            the answer's text has to equal this
    prompt_has      the rendered prompt has to contain this
    check           Python expression over `a`, the Answer, and the names of checks.py
    refused         field that the error names (null: none), with status (400) and why
    streams         true in a section's defaults: all its rows once more with `stream`

The other keys are the fields of Behaviour.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from baton.rooms.request import FinishReason
from tests.api.behaviours.checks import VALUES, passes
from tests.api.behaviours.sending import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Answer,
    Behaviour,
    Check,
    Refused,
)
from tests.api.scripted import batch

HERE: Final = Path(__file__).parent
PATHS: Final = {"chat": CHAT, "completions": COMPLETIONS, "responses": RESPONSES, "messages": MESSAGES}
SOURCES: Final[Mapping[str, str]] = yaml.safe_load((HERE / "sources.yaml").read_text("utf-8"))
FILES: Final = {
    "completions": "completions",
    "chats": "chats",
    "streams and usage": "streams_and_usage",
    "drawing and ends": "drawing_and_ends",
    "log-probabilities": "log_probabilities",
    "several answers": "several_answers",
    "prompts that are scored": "prompts_that_are_scored",
    "structured output": "structured_output",
    "tools": "tools",
    "reasoning": "reasoning",
    "tokens": "tokens",
    "`/v1/responses`": "responses",
    "`/v1/messages`": "messages",
    "models, versions, errors": "models_versions_errors",
    "other kinds of service": "other_kinds_of_service",
}
"""File of each group."""
FAULT: Final = "a fault of the request"

Row = Mapping[str, Any]


def read_group(path: Path) -> Iterator[Behaviour]:
    """Yield the rows of one file."""
    for section in yaml.safe_load(path.read_text("utf-8")):
        defaults: Row = section["defaults"]
        rows = [each for row in section["rows"] for each in by_path({**defaults, **row})]
        for row in rows:
            yield behaviour(row)
        if defaults.get("streams"):
            for row in rows:
                fields = {**row.get("fields", {}), "stream": True}
                yield behaviour({**row, "claim": f"{row['claim']}, in a stream", "fields": fields})


def by_path(row: Row) -> Iterator[Row]:
    """Yield the row once for each of its paths."""
    paths = row["path"] if isinstance(row["path"], list) else [row["path"]]
    sources = row["from"] if isinstance(row["from"], list) else [row["from"]] * len(paths)
    for path, source in zip(paths, sources, strict=True):
        yield {**row, "path": path, "from": source}


def behaviour(row: Row) -> Behaviour:
    peer = row["from"].partition(" ")[0]
    output: Any = value(row.get("output", "Hello world"))
    if "output_tokens" in row:
        output = [batch(row["output_tokens"], FinishReason.STOP)]
    return Behaviour(
        row["claim"],
        f"{peer} {SOURCES[row['from']]}",
        expectation(row),
        PATHS.get(row["path"]) or str(row["path"]),
        fields=value(row.get("fields", {})),
        output=output,
        ends=FinishReason(row.get("ends", "stop")),
        model=row.get("model", "plain"),
        headers=row.get("headers", {}),
        method=row.get("method", "POST"),
        raw=row["raw"].encode() if "raw" in row else None,
        settings=row.get("settings", {}),
    )


def value(given: Any) -> Any:
    """Replace each `$NAME` by its value."""
    if isinstance(given, dict):
        return {key: value(each) for key, each in given.items()}
    if isinstance(given, list):
        return [value(each) for each in given]
    if given == "$absent":
        return ...
    if isinstance(given, str) and given[:1] == "$" and given[1:] in VALUES:
        return value(VALUES[given[1:]])
    return given


def expectation(row: Row) -> Check | Refused:
    """Return the check of a row. A row without one has to be answered with 200."""
    if "refused" in row:
        return Refused(row["refused"], row.get("status", 400), row.get("why", FAULT))
    if "text" in row:
        return partial(has_text, value(row["text"]))
    if "prompt_has" in row:
        return partial(prompt_has, row["prompt_has"])
    return partial(passes, row.get("check", "a.status == 200"))


def has_text(text: str, answer: Answer) -> bool:
    return bool(answer.text == text)


def prompt_has(text: str, answer: Answer) -> bool:
    return text in answer.prompt


GROUPS: Final[Mapping[str, Sequence[Behaviour]]] = {
    group: [*read_group(HERE / f"{name}.yaml")] for group, name in FILES.items()
}


def is_fault(row: Behaviour) -> bool:
    """Return whether the peer's test, too, asserts that the request is refused."""
    return isinstance(row.expected, Refused) and row.expected.why == FAULT


def is_right(row: Behaviour) -> bool:
    """Return whether the row is as the peer's test has it."""
    return not isinstance(row.expected, Refused) or is_fault(row)
