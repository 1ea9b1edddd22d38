"""Computation of a step's logits over KV pages, by one of several runners.

The engine calls `Runner.logits` once a step. There are these runners: the transformers implementation, our
fused decoder, its CUDA graphs, one compiled call on CPUs, and the library row by row. `loading` chooses the
runner. May import `quantization`, and knows nothing of files.
"""
