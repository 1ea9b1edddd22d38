"""Grammars that constrain a model's output, compiled with llguidance.

The router checks a client's grammar (`grammar_check`). A worker compiles it again (`grammar_cache`) and asks
its state for the mask of each token (`grammar_state`). Imports `rooms`, `runtime` and `models`, and no torch.
"""
