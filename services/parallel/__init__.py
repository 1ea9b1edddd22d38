"""Agreement among the ranks of one worker, once a turn: one protocol, and its backends gloo and solo.

`RankGroup` (`rank_group`) is the protocol that the turn loop calls: `broadcast`, `agree`, and `gather` when
all ranks know that one is due. `GlooGroup` has one process per rank, `SoloGroup` has one rank. The package
imports the runtime. Only `gloo`, `gloo_exchange` and `rendezvous` import torch.
"""
