"""State of one room on one rank: its phases, its moves, its evidence, and how ranks agree on them.

A room is one request on one prefill and one decode worker. `handover.turn` drives all rooms of a rank once
a turn, by `Roster.votes`, the collective over the ballots, `read_verdict` and `Roster.settle`. Values that
workers and the router share are here, too: requests, reasons, timelines, and what a worker registers and
reports. The package is pure and imports `topology` and `ids` alone.

Names in backticks with hyphens, here and everywhere in the code, are invariants: docs/invariants.md says what
each means, what holds it, and which mutant shows that.
"""
