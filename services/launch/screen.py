"""What does whoever started the stack see of it?

On a terminal, the step being made has a spinner; elsewhere each step is one plain line. What cannot be
written, since a disk is full or the reader has gone, is left out: the stack goes on.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.markup import escape

from baton.runtime.clock import Clock


class Screen:
    """Writes to a rich console."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock

    def say(self, line: str) -> None:
        with suppress(OSError):
            if self._console.is_terminal:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:  # the console keeps what it could not write, and ends the process where nobody reads
                print(line, file=self._console.file, flush=True)

    @contextmanager
    def step(self, text: str) -> Generator[Callable[[str], None], None, None]:
        """Show that `text` is being done, and when it was done how long it took."""
        started_ms = self._clock.now_ms()
        if self._console.is_terminal:
            with self._console.status(escape(text)) as status:
                yield lambda detail: status.update(escape(f"{text}: {detail}"))
        else:
            self.say(f"… {text}")
            yield lambda detail: self.say(f"  {detail}")
        self.say(f"✓ {text} ({(self._clock.now_ms() - started_ms) / 1000:.1f} s)")
