"""Step of any engine: what is computed by a `Runner`, and what every engine does around it.

`step_engine` has the step. `runner` is what an engine brings to it, `kv_memory` the memory. The ranks of a
worker meet in `rank_startup`, and exchange tensors, draws, scores and page sums by `collectives`,
`process_group` and `sampled_results`. Needs torch, but knows no model and no engine. May import `sampling`
and everything below.
"""
