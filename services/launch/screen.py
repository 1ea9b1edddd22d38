"""Progress lines that `baton serve` shows while a stack starts, runs and stops.

On a terminal the current step has a spinner. Elsewhere each step is one plain line. Lines that cannot be
written are dropped, for example if a disk is full or the reader has gone, and the stack goes on.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.markup import escape

from baton.runtime.clock import Clock


class Screen:
    """Writer of progress lines to a rich console."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock

    def show(self, line: str) -> None:
        """Write one progress line."""
        with suppress(OSError):
            if self._console.is_terminal:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:  # rich's console would end the process if its reader has gone
                print(line, file=self._console.file, flush=True)

    @contextmanager
    def step(self, text: str) -> Generator[Callable[[str], None], None, None]:
        """Context manager that shows the step `text` while it runs, and its duration at its end.

        It yields a function that shows a detail of the step.
        """
        started_ms = self._clock.now_ms()
        if self._console.is_terminal:
            with self._console.status(escape(text)) as status:
                yield lambda detail: status.update(escape(f"{text}: {detail}"))
        else:
            self.show(f"… {text}")
            yield lambda detail: self.show(f"  {detail}")
        self.show(f"✓ {text} ({(self._clock.now_ms() - started_ms) / 1000:.1f} s)")
