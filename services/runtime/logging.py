"""Logging: formats and fields of log lines, and writing that never blocks.

A message is a constant. Values go into fields (`room`, `request_id`, `trace_id`, `worker`, …), so that lines
can be searched and counted. A line with a room also has its request and its trace, if the process knows them
(`name_rooms`). Prompts and generated text are never logged unless `--log-prompts` is set
(`secrets-unlogged`). No service waits for the reader of its log (`no-blocking`).
"""

import json
import logging
import re
import select
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, LiteralString, TextIO

from baton.ids import RoomId

FieldValue = str | int | float | bool | None
VALUE_CHARS_MAX: Final = 512
PLAIN: Final = re.compile("[!#-&(-<>-~]+")
"""Pattern of field values that are written without quotes, which are most."""
PIECE_CHARS: Final = select.PIPE_BUF // len(r"\U00000000")
"""Number of characters that a pipe or terminal accepts in one write, whatever characters they are."""
PATIENCE_MS: Final = 100
"""Longest wait for the log's reader before lines are left out, in milliseconds."""
LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

encode: Final = json.JSONEncoder(ensure_ascii=False).encode

Names = Callable[[RoomId], Mapping[str, str]]
"""Function that returns further log fields for a room: `request_id`, `trace_id`. Empty for an
unknown room."""


def _no_names(_: RoomId) -> Mapping[str, str]:
    return {}


_names: Names = _no_names


def name_rooms(names: Names = _no_names, *, also: bool = False) -> None:
    """Add the fields that `names` returns to each later log line with a `room`.

    `also`: whether to keep the function that was set before, in a process of several services.
    """
    global _names  # global, like the handlers that `configure` sets
    before = _names
    _names = (lambda room: {**before(room), **names(room)}) if also else names


class Log:
    """A named logger with fields that it adds to each of its lines."""

    __slots__ = ("_fields", "_logger")

    def __init__(self, name: str, **fields: FieldValue) -> None:
        self._logger = logging.getLogger(name)
        self._fields = fields

    def bind(self, **fields: FieldValue) -> "Log":
        """Return a logger that adds further fields to this logger's."""
        return Log(self._logger.name, **{**self._fields, **fields})

    def debug(self, message: LiteralString, **fields: FieldValue) -> None:
        self._write(logging.DEBUG, message, fields, error=None)

    def info(self, message: LiteralString, **fields: FieldValue) -> None:
        self._write(logging.INFO, message, fields, error=None)

    def warning(self, message: LiteralString, **fields: FieldValue) -> None:
        self._write(logging.WARNING, message, fields, error=None)

    def error(self, message: LiteralString, error: BaseException | None = None, **fields: FieldValue) -> None:
        """Log a line at level error. With `error`, its traceback follows the line."""
        self._write(logging.ERROR, message, fields, error=error)

    def _write(
        self, level: int, message: str, fields: dict[str, FieldValue], error: BaseException | None
    ) -> None:
        if self._logger.isEnabledFor(level):
            merged = {**self._fields, **fields}
            if isinstance(room := merged.get("room"), int) and "request_id" not in merged:
                merged |= _names(RoomId(room))
            self._logger.handle(_record(self._logger.name, level, message, merged, error))


def _record(
    name: str, level: int, message: str, fields: dict[str, FieldValue], error: BaseException | None = None
) -> logging.LogRecord:
    """Return a log record. The standard library's own method also looks up the source line, which no format
    shows."""
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord(name, level, "", 0, message, None, exc_info)
    record.baton_fields = fields
    return record


def _fields(record: logging.LogRecord) -> dict[str, FieldValue]:
    fields: dict[str, FieldValue] = getattr(record, "baton_fields", {})
    return {name: _bounded(value) for name, value in fields.items() if value is not None}


def _bounded(value: FieldValue) -> FieldValue:
    if isinstance(value, str) and len(value) > VALUE_CHARS_MAX:
        return value[:VALUE_CHARS_MAX] + "…"
    return value


def _ids_as_text(fields: dict[str, FieldValue]) -> dict[str, FieldValue]:
    """Return the fields with room ids as text, because most readers of JSON cannot represent
    64-bit numbers."""
    return {name: str(value) if name == "room" else value for name, value in fields.items()}


def _time(record: logging.LogRecord) -> str:
    return f"{_second(int(record.created))}.{int(record.msecs):03}Z"


@lru_cache(maxsize=1)
def _second(since_epoch: int) -> str:
    return datetime.fromtimestamp(since_epoch, UTC).isoformat().removesuffix("+00:00")


class TextFormatter(logging.Formatter):
    """Formatter of log lines as text.

    Example: `2026-01-31T12:00:00.000Z INFO decode.turn room admitted room=7 worker=decode-0`
    """

    def __init__(self, **always: FieldValue) -> None:
        """Make a formatter. `always`: fields that are added to every log line."""
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
    """Formatter of log lines as JSON: one object with time, level, logger, message, fields and
    any traceback."""

    def __init__(self, **always: FieldValue) -> None:
        """Make a formatter. `always`: fields that are added to every log line."""
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


class Lines(logging.StreamHandler[TextIO]):
    """Log handler that leaves out lines if the pipe or terminal does not accept them, instead of blocking.

    That happens for example if the reader is stopped. The next line says how many were left out.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._ready: select.poll | None = select.poll()
        self._left_out = 0
        self._cut = False
        """Whether the last write to the log's stream ended in the middle of a line."""
        try:
            self._ready.register(stream, select.POLLOUT)
        except (OSError, TypeError, ValueError):  # not a real file
            self._ready = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = f"{self.format(record)}\n"
            if self._left_out:
                fields: dict[str, FieldValue] = {"lines": self._left_out}
                record = _record(__name__, logging.WARNING, "the log was not read: lines are missing", fields)
                text = f"{self.format(record)}\n{text}"
            self._left_out = 0 if self._write(f"\n{text}" if self._cut else text) else self._left_out + 1
        except Exception:
            self.handleError(record)

    def _write(self, text: str) -> bool:
        """Write a log line to the stream. Return whether the stream accepted all of it."""
        for begin in range(0, len(text), PIECE_CHARS):
            if self._ready is not None and not self._ready.poll(0 if self._left_out else PATIENCE_MS):
                return False
            self.stream.write(text[begin : begin + PIECE_CHARS])
            self.flush()
            self._cut = begin + PIECE_CHARS < len(text)
        return True


def configure(level: str, log_format: str, stream: TextIO | None = None, **always: FieldValue) -> None:
    """Send every logger of the process to `stream`, which is stderr by default, and replace earlier handlers.

    `level`: a key of LEVELS. `log_format`: "text" or "json". `always`: fields that every line gets. The HTTP
    client's and server's lines about single requests appear only at "debug", because metrics count the same.
    The tensor library's lines, one for each layer of each step, do not appear either.
    """
    handler = Lines(sys.stderr if stream is None else stream)
    always = {name: value for name, value in always.items() if value is not None}
    handler.setFormatter(JsonFormatter(**always) if log_format == "json" else TextFormatter(**always))
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # no format shows them
    logging.basicConfig(level=LEVELS[level], handlers=[handler], force=True)
    for name in ("uvicorn", "uvicorn.access", "httpx", "asyncio", "torch.nn.attention.varlen"):
        logging.getLogger(name).setLevel(max(LEVELS[level], logging.WARNING) if level != "debug" else "DEBUG")
