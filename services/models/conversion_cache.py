"""Cache of converted models: a GGUF file is converted only once, however many processes need it.

    $XDG_CACHE_HOME/baton/models/NAME-FINGERPRINT/         the whole result, or absent.
    $XDG_CACHE_HOME/baton/models/NAME-FINGERPRINT.lock     locked by the process that converts.
    $XDG_CACHE_HOME/baton/models/NAME-FINGERPRINT.part/    what it has written so far.

The finished directory appears by one rename. When a process dies the lock is free, and the next process
starts over. The conversion needs the tensor library, which the caller may not load. So it runs in a process
of its own, which ends with its caller.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from baton.models.fingerprint import sampled_digest
from baton.models.model_facts import reading
from baton.runtime.child_process import child_environ, module_command, tied_command
from baton.runtime.errors import StartupError

CONVERTER: Final = "baton.engine.gguf.convert"
CONVERSION_FORMAT: Final = b"6"
"""Version of the converter's output, a part of each fingerprint. Change it when the output changes."""
CONVERSION_DEADLINE_S: Final = 1800.0
LOCK_POLL_S: Final = 0.2
LAST_WORDS_BYTES: Final = 4096


class ConversionFailed(StartupError):
    """The model's file could not be converted, or not in time. The text gives the converter's last line or
    the time."""


def convert_once(
    source: Path, name: str, report: Callable[[str], None], deadline_s: float = CONVERSION_DEADLINE_S
) -> Path:
    """Return the directory with the converted model of the file `source`. Convert it if no process has
    before.

    `name`: readable part of the directory's name. `report`: called with lines about the progress.
    `deadline_s`: longest wait for another process's conversion, and for its own, in seconds. Raises
    StartupError when it passes, or when the conversion fails.
    """
    with reading(source):
        fingerprint = hashlib.sha256(CONVERSION_FORMAT + sampled_digest(source)).hexdigest()[:16]
    safe_name = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80]
    target = cache_root() / "models" / f"{safe_name}-{fingerprint}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(target.name + ".lock"), report, deadline_s) as lock:
            if not target.is_dir():
                part = target.with_name(target.name + ".part")
                shutil.rmtree(part, ignore_errors=True)
                try:
                    _convert(source, part, name, report, deadline_s, lock)
                    part.rename(target)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise StartupError(f"the model cache {target.parent} cannot be used: {error}") from error
    return target


def cache_root() -> Path:
    """Return Baton's folder for cached files: under $XDG_CACHE_HOME, else under ~/.cache.

    Raises StartupError if neither is known.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(configured) if Path(configured).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        text = "there is no home directory to keep a converted model in: set HOME or XDG_CACHE_HOME"
        raise StartupError(text) from None
    return root / "baton"


@contextmanager
def _locked(path: Path, report: Callable[[str], None], deadline_s: float) -> Iterator[IO[str]]:
    ends = time.monotonic() + deadline_s
    is_reported = False
    with path.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if time.monotonic() >= ends:
                raise ConversionFailed(
                    f"another process has been converting this model for over {deadline_s:.0f} s; "
                    f"if none is, remove {path}"
                )
            if not is_reported:
                report("waiting for another process that is converting the model")
                is_reported = True
            time.sleep(LOCK_POLL_S)
        yield lock


def _convert(
    source: Path, part: Path, name: str, report: Callable[[str], None], deadline_s: float, lock: IO[str]
) -> None:
    report(f"converting {source.name}, once")
    with tempfile.TemporaryFile() as errors:
        # The converter inherits the lock. If this process dies, the lock lasts until the converter has ended.
        process = subprocess.Popen(  # noqa: S603
            tied_command(*module_command(CONVERTER, str(source), str(part), name)),
            env=child_environ(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            pass_fds=(lock.fileno(),),
        )
        end = threading.Timer(deadline_s, process.kill)
        end.start()
        try:
            for line in process.stdout or ():
                report(line.rstrip())
            code = process.wait()
        finally:
            end.cancel()
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if code != 0:
            raise ConversionFailed(f"converting {source} failed: {_last_words(errors) or f'exit {code}'}")


def _last_words(errors: IO[bytes]) -> str:
    """Return the last line of `errors`, the converter's stderr."""
    errors.seek(max(0, errors.seek(0, 2) - LAST_WORDS_BYTES))
    lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
