"""Program that stands in for the GGUF converter. It notes that it ran, and does what its source file says.

    ok    writes a directory of one file
    fail  writes half of it, and fails with a last line
    hang  writes half of it, and does not end by itself
    once  hangs the first time only

The word follows the header, which has no fields.
"""

import os
import sys
import time
from pathlib import Path


def main(source: Path, target: Path, name: str) -> int:
    notes = source.with_suffix(".runs")
    before = notes.read_text() if notes.exists() else ""
    notes.write_text(f"{before}{os.getpid()}\n")
    sys.stdout.write(f"working on {name}\n")
    sys.stdout.flush()
    what = source.read_bytes()[24:].decode()
    target.mkdir()
    (target / "half").write_text(name)
    if what == "fail":
        sys.stderr.write("Trace\nKeyError: no such tensor\n")
        return 1
    time.sleep(300 if what == "hang" or (what == "once" and not before) else 0.3)
    (target / "config.json").write_text("{}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
