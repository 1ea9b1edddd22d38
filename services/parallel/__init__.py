"""Agreement of the ranks of one worker, once a turn: one protocol, and its backends gloo and solo.

`RankGroup` (`rank_group`) is the protocol that the turn loop calls: `broadcast`, `agree`, and `gather`
where all ranks know to need it. `GlooGroup` has one process per rank, `SoloGroup` one rank. The package
imports the runtime, and torch in `gloo`, `gloo_exchange` and `rendezvous` only.
"""
