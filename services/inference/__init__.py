"""The part of a step that is the same for every engine: sampling, prompt log-probabilities, page checksums.

`step_engine` has the step. `runner` defines what an engine adds: the computation of logits. `kv_memory` has
the KV memory. `rank_startup` connects the ranks of a worker. They exchange tensors, tokens, scores and page
checksums by `collectives`, `process_group` and `sampled_results`. Needs torch, but knows no model and no
engine. May import `sampling` and everything below.
"""
