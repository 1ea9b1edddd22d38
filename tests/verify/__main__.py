"""The command of `make verify`: the model, the simulation and the mutants.

`make verify`: the model, the simulation and the mutants, three processes at a time. One JSON object on
stdout, progress on stderr; exit status 1 if anything is broken, missed or short.

`--long` (`make verify-long`) goes on for hours, with a line of JSON for every piece.
"""

import argparse
import json
import sys
import time
from itertools import chain
from typing import Final

from tests.verify.lanes import in_lanes
from tests.verify.long import go_on
from tests.verify.parts import ModelPart, Mutants, Simulation

ROOMS: Final = 100_000
SIMULATION_S: Final = 1_080.0
"""Time after which no further seeds are begun, seconds. The few that run then end soon."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.verify", description=__doc__)
    parser.add_argument("--rooms", type=int, default=ROOMS, help="to simulate, at least")
    parser.add_argument("--seed", type=int, help="the first of the simulation")
    parser.add_argument("--jobs", type=int, default=3, help="at a time: a mutant's test often waits")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--hours", type=float, help="of --long; without it, until it is stopped")
    args = parser.parse_args()
    if args.long:
        return go_on(args.seed, args.hours, args.jobs)
    started = time.monotonic()
    model, mutants = ModelPart(), Mutants()
    simulation = Simulation(args.rooms, args.seed or 0, started + SIMULATION_S)
    computing = chain(model.pieces(), simulation.pieces())
    problems = in_lanes(computing, mutants.pieces(), args.jobs)
    sound = not problems and all(part.sound for part in (model, simulation, mutants))
    told = {
        "model": model.found,
        "simulation": simulation.summary(),
        "mutants": mutants.summary(),
        "problems": problems,
        "seconds": round(time.monotonic() - started, 1),
        "ok": sound,
    }
    sys.stdout.write(json.dumps(told) + "\n")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
