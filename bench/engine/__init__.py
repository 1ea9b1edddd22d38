"""Benchmarks of the engine: a step, quantized weights, grammars, drafts."""
