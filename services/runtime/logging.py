"""What does a log line look like, and which facts may it carry?

A message is a constant; what varies goes into fields (`room`, `request_id`, `trace_id`, `worker`, …), so that
lines can be searched and counted. A line that names a room names its request and its trace as well, where the
process knows them (`name_rooms`). Prompts and generated text are never logged unless `--log-prompts` asks for
it (`secrets-unlogged`).
"""

import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, LiteralString, TextIO

FieldValue = str | int | float | bool | None
VALUE_CHARS_MAX: Final = 512
PLAIN: Final = re.compile("[!#-&(-<>-~]+")
"""Most values: seen at once to need no quotes."""
LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

encode: Final = json.JSONEncoder(ensure_ascii=False).encode

Names = Callable[[int], Mapping[str, str]]
"""What else a room is known by: `request_id`, `trace_id`; nothing for one that is not known."""


def _no_names(_: int) -> Mapping[str, str]:
    return {}


_names: Names = _no_names


def name_rooms(names: Names = _no_names) -> None:
    """From now on lines of this process that have a `room` get these names of it, too."""
    global _names  # like the handlers, which `configure` sets for the process
    _names = names


class Log:
    """A named logger with fields that go into each of its lines."""

    __slots__ = ("_fields", "_logger")

    def __init__(self, name: str, **fields: FieldValue) -> None:
        self._logger = logging.getLogger(name)
        self._fields = fields

    def bind(self, **fields: FieldValue) -> "Log":
        """The same logger with further fields on every line."""
        return Log(self._logger.name, **{**self._fields, **fields})

    def debug(self, message: LiteralString, **fields: FieldValue) -> None:
        self._write(logging.DEBUG, message, fields, error=None)

    def info(self, message: LiteralString, **fields: FieldValue) -> None:
        self._write(logging.INFO, message, fields, error=None)

    def warning(self, message: LiteralString, **fields: FieldValue) -> None:
        self._write(logging.WARNING, message, fields, error=None)

    def error(self, message: LiteralString, error: BaseException | None = None, **fields: FieldValue) -> None:
        """With `error`, its traceback follows the line."""
        self._write(logging.ERROR, message, fields, error=error)

    def _write(
        self, level: int, message: str, fields: dict[str, FieldValue], error: BaseException | None
    ) -> None:
        if self._logger.isEnabledFor(level):
            merged = {**self._fields, **fields}
            if isinstance(room := merged.get("room"), int) and "request_id" not in merged:
                merged |= _names(room)
            told = None if error is None else (type(error), error, error.__traceback__)
            # The library's own way to a record looks for its line of source, which nobody is shown.
            record = logging.LogRecord(self._logger.name, level, "", 0, message, None, told)
            record.baton_fields = merged
            self._logger.handle(record)


def _fields(record: logging.LogRecord) -> dict[str, FieldValue]:
    fields: dict[str, FieldValue] = getattr(record, "baton_fields", {})
    return {name: _bounded(value) for name, value in fields.items() if value is not None}


def _bounded(value: FieldValue) -> FieldValue:
    if isinstance(value, str) and len(value) > VALUE_CHARS_MAX:
        return value[:VALUE_CHARS_MAX] + "…"
    return value


def _ids_as_text(fields: dict[str, FieldValue]) -> dict[str, FieldValue]:
    """Ids of rooms are text: they do not fit the numbers of most readers of JSON."""
    return {name: str(value) if name == "room" else value for name, value in fields.items()}


def _time(record: logging.LogRecord) -> str:
    return f"{_second(int(record.created))}.{int(record.msecs):03}Z"


@lru_cache(maxsize=1)
def _second(since_epoch: int) -> str:
    return datetime.fromtimestamp(since_epoch, UTC).isoformat().removesuffix("+00:00")


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO decode.turn room admitted room=7 worker=decode-0`"""

    def __init__(self, **always: FieldValue) -> None:
        """`always`: fields of every line."""
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().replace("\n", "\\n")
        fields = self._always | _fields(record)
        pairs = "".join(f" {name}={self._value(value)}" for name, value in fields.items())
        line = f"{_time(record)} {record.levelname} {record.name} {message}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line

    @staticmethod
    def _value(value: FieldValue) -> str:
        text = str(value)
        if PLAIN.fullmatch(text):
            return text
        plain = text.isprintable() and not set(text) & set(" =\"'") and text != ""
        return text if plain else json.dumps(text)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the fields, and the traceback if there is one."""

    def __init__(self, **always: FieldValue) -> None:
        """`always`: fields of every line."""
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, FieldValue] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = _ids_as_text(self._always | _fields(record))
        entry |= {name: value for name, value in fields.items() if name not in entry}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return encode(entry)


def configure(level: str, log_format: str, stream: TextIO | None = None, **always: FieldValue) -> None:
    """Send every logger of the process to `stream` (stderr). Replaces earlier handlers.

    `level` is a key of LEVELS, `log_format` is "text" or "json", `always` are fields of every line. The
    HTTP client's and server's lines about single requests are kept out below "debug": they repeat what the
    metrics count; so are the tensor library's, one for each layer of each step.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    always = {name: value for name, value in always.items() if value is not None}
    handler.setFormatter(JsonFormatter(**always) if log_format == "json" else TextFormatter(**always))
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # no line shows them
    logging.basicConfig(level=LEVELS[level], handlers=[handler], force=True)
    for name in ("uvicorn", "uvicorn.access", "httpx", "asyncio", "torch.nn.attention.varlen"):
        logging.getLogger(name).setLevel(max(LEVELS[level], logging.WARNING) if level != "debug" else "DEBUG")
