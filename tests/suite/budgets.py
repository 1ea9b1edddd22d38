"""Has a folder of tests grown by a fifth since its time was written down?

A folder's budget is its sum in `tests/durations.json`. Machines differ in speed, so a run is judged at its
own pace: a folder may take its budget, times what the other folders took of theirs.

    python -m tests.suite.budgets --rewrite              all budgets anew, from the last `make test-all`
    python -m tests.suite.budgets --rewrite tests/cli    those of these folders, at the pace of that run
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tests.suite.durations import ROOT, Durations, Seconds, folder_of, record_of, write, written_by
from tests.suite.tiers import ALL

GROWN: Final = 1.2
NOISE_S: Final = 8.0
"""What a folder may take beside its budget, however small that is: what a process imports, compiles or starts
once is charged to whichever file comes to it first."""
WEIGHT_S: Final = 30.0
"""A shorter folder weighs as little in the pace as its budget is small; a longer one no more than this, or it
would be the pace of all others."""
REWRITE: Final = "python -m tests.suite.budgets --rewrite"


def pace(measured: Seconds, budgets: Seconds, leaving_out: str = "") -> float:
    """How long this run takes for a second of budget: the median over the folders but one, so that what that
    one took does not move it, and what another took hardly. 1 where no other folder says."""
    ratios = sorted(
        (measured[folder] / budget, min(budget, WEIGHT_S))
        for folder, budget in budgets.items()
        if folder in measured and folder != leaving_out and budget > 0
    )
    half = sum(weight for _, weight in ratios) / 2
    for ratio, weight in ratios:
        half -= weight
        if half <= 0:
            return ratio
    return 1.0


def complaints(measured: Seconds, budgets: Seconds) -> Iterator[tuple[str, str]]:
    """Each folder that is not within its budget, and why not."""
    for folder, seconds in sorted(measured.items()):
        if folder not in budgets:
            yield folder, f"took {seconds:.1f} s and has no budget: {REWRITE} {folder}"
            continue
        its_pace = pace(measured, budgets, folder)
        allowed = budgets[folder] * its_pace
        if seconds >= GROWN * allowed and seconds - allowed >= NOISE_S:
            budget = f"its budget of {budgets[folder]:.1f} s is {allowed:.1f} s"
            pace_of_run = f"at the pace of this run ({its_pace:.2f})"
            remedy = f"make it quick again, or say in the commit why not, with {REWRITE} {folder}"
            yield folder, f"took {seconds:.1f} s, and {budget} {pace_of_run}: {remedy}"
    for folder in sorted(budgets.keys() - measured.keys()):
        yield folder, f"has a budget and no test: {REWRITE} {folder}"


def rewritten(record: Durations, last: Durations, folders: Sequence[str]) -> Durations:
    """The record with what the last run took; where folders are named, of these alone and at its pace."""
    if not folders:
        return last
    its_pace = pace(last.folders(), record.folders())

    def of_part(part: str) -> Mapping[str, float]:
        kept = {file: s for file, s in record.files.get(part, {}).items() if folder_of(file) not in folders}
        came = {file: s / its_pace for file, s in last.files.get(part, {}).items()}
        return kept | {file: s for file, s in came.items() if folder_of(file) in folders}

    return Durations({part: of_part(part) for part in dict.fromkeys((*record.files, *last.files))})


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suite.budgets", description=__doc__)
    parser.add_argument("--rewrite", action="store_true", required=True)
    parser.add_argument("folders", nargs="*", help="as tests/cli; without, all of them")
    args = parser.parse_args(words)
    run = written_by(ALL, ROOT)
    if not run.exists():
        sys.stderr.write(f"there is no {run}: `make test-all` writes it\n")
        return 1
    record, last = Durations.read(record_of(ROOT)), Durations.read(run)
    known = record.folders().keys() | last.folders().keys()
    if unknown := [folder for folder in args.folders if folder not in known]:
        sys.stderr.write(f"no such folder of tests: {', '.join(unknown)}\n")
        return 1
    write(record_of(ROOT), rewritten(record, last, args.folders).told())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
